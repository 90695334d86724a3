"""Whether a model that is not on this machine can fit, found out by its header before all of it is downloaded."""

import tempfile
from dataclasses import replace
from pathlib import Path

from edgedec.api.load import asked_plan
from edgedec.api.options import Application, EngineOptions
from edgedec.api.plan import find_model
from edgedec.errors import EdgedecError, MemoryCapError
from edgedec.memory.planner import plan_within
from edgedec.memory.setting import Cap, planning_bytes
from edgedec.progress import check_cancelled
from edgedec_models.stand_in import model_or_stand_in


def require_fit(model: str, options: EngineOptions, application: Application, cap: Cap) -> None:
    """Refuse a model that is not on this machine and can't fit under a cap, before it is downloaded.

    Where its header can't be had by itself, nothing is refused. The models beside it are left out of account.

    Raises:
        MemoryCapError: The model can't fit.
        CancelledError: The work was cancelled.
    """
    with tempfile.TemporaryDirectory(prefix="edgedec-") as folder:
        try:
            path = model_or_stand_in(model, options.resolving, Path(folder))
            if not path.is_relative_to(folder):
                return
            alone = replace(options, draft_model=None, draft_head=None, lossy=replace(options.lossy, methods=None))
            room = planning_bytes(cap)
            chosen = find_model(path, alone, room, measure=False)
            plan = plan_within(asked_plan(chosen, alone, application, room), cap)
        except MemoryCapError:
            raise
        except EdgedecError:
            check_cancelled(options.cancel, f"read the header of {model}")
            return  # loading says what is wrong
        plan.memory.require()
