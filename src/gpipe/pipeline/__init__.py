"""The pipeline engine; needs torch and nothing else."""
