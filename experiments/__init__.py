"""Studies that need more than one run of train.py.

A study is a file or a folder. Run it with `python -m experiments.<study>` in the root of the repository. `--help` lists
its options. In a folder, `__main__.py` is the program, and the other files are its parts. `data/` prepares the data
sets that come with the package.
"""
