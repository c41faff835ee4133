"""What every command uses: errors, settings, command line, files and stores. No heavy import."""
