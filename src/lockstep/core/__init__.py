"""Values and arithmetic that use only the standard library, numpy and ml_dtypes; no framework and no processes."""
