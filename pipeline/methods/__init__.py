"""One file per method. `base.py` is the contract, `options.py` the settings, `parts/` what methods share."""
