"""A runtime's model in a process of its own: where its library may end the process, the application lives on."""
