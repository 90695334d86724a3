"""Published methods that `auto` does not use: a file each, found by entry point, as those of any other package.

Nothing in the core, the runtimes or the apps imports this package, but for `edgedec/api/load.py`, which composes. A
file here stands for one published system and says so in its docstring, from which `tests/methods/test_method_table.py`
writes a row of the table in docs/methods.md:

    \"\"\"Block verification: a drafted chain is verified as a whole, which accepts at least as much as token by token.

    Whatever else a reader needs to know, in paragraphs.

    Paper: Sun et al. 2024, arXiv:2403.10444
    Option: `--draft-option rule=block`
    For: comparing rules that keep the distribution, not the text
    Measured: 46.4 tokens/s, where `coupled` has 54.2 (`studies/drawn_trees`, program at 67b59fb8)
    Status: study
    \"\"\"

The first line is the system's name, a colon, and what the system does. The five fields end the docstring, in this
order. A field may go on in further lines, each indented by four spaces. `Option` is how a user reaches the method.
`Measured` has a figure with the command or program that gives it, or says "nothing yet". `Status` is `study` for a
method that was not faster or better wherever it was compared, and `opt-in` for one that helps some users. A file
without these fields serves the other files, and is no method.
"""
