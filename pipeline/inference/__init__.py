"""A trained model outside of training: exported, opened from anywhere, used to predict."""
