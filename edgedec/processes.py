"""Child processes that may start others, as far as systems differ: started in a group, and ended with all of it."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

OWN_GROUP: dict[str, Any]
"""Arguments of Popen: Ctrl-C at the terminal is not for the process, and end_group ends what it starts."""

if sys.platform == "win32":
    OWN_GROUP = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}

    def end_group(pid: int, *, at_once: bool) -> None:
        """End a process and, while it lives, what it started: without a warning, as Windows has none."""
        import psutil

        with suppress(psutil.Error):
            process = psutil.Process(pid)
            for each in (*process.children(recursive=True), process):
                with suppress(psutil.Error):
                    each.kill()

else:
    OWN_GROUP = {"start_new_session": True}

    def end_group(pid: int, *, at_once: bool) -> None:
        """End a process that was started with OWN_GROUP, and what it started: by SIGTERM, or by SIGKILL `at_once`."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL if at_once else signal.SIGTERM)
