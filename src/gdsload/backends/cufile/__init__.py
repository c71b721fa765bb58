"""The cuFile backends, `gds` and `gds_mt`: storage reads to VRAM by GPUDirect Storage."""
