"""Published methods that `auto` does not use: a file each, found by entry point, as those of any other package.

Nothing in the core, the runtimes or the apps imports this package. A file says in its docstring which paper it follows,
and what the method is for.
"""
