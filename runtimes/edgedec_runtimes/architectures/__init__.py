"""The architectures that runtimes of our own run, each in a file; docs/plugins.md says how to add one."""
