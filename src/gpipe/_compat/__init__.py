"""Workarounds for other packages and uses of their private names, each with the version and the reason.

Private names may change with any version. They are used only here and in `gpipe.pipeline._compat`, because the engine
needs only torch; ruff refuses their import elsewhere.
"""
