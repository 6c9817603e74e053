"""What other packages need to be imported or used here, each with its version and the reason.

Private names of other packages may change with any version of theirs. They are here, and in `gpipe.pipeline._compat`,
since the engine needs torch alone; ruff refuses their import elsewhere.
"""
