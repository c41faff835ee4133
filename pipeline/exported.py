"""Logged MLflow models name this module as their loader. The code is in `pipeline.inference.pyfunc`."""

from pipeline.inference.pyfunc import _load_pyfunc as _load_pyfunc
