"""`python -m edgedec_apps.cli` is `edgedec`."""

from edgedec_apps.cli import main

if __name__ == "__main__":
    main()
