"""A trained model outside of training: exported, opened from anywhere, asked about pictures."""
