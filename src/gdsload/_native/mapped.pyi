# Nothing of it is called from Python: see mapped.pxd.
