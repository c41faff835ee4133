"""What every command stands on: errors, settings, command line, files and stores. No heavy import."""
