"""Pictures become shards, once: sources -> bias -> tar or FFCV shards -> manifest."""
