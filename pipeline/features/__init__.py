"""Features of a frozen backbone: computed once, stored beside the shards, and the backbone that made them."""
