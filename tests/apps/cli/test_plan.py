"""edgedec plan: the terms, what is chosen under a cap, what else would fit, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_models import tiny_llama
from support.processes.command_line import Result, run_here

from edgedec.progress import CancelToken
from edgedec_apps.cli.opening import open_model
from edgedec_apps.cli.options import LoadFlags, OutputFlags
from edgedec_apps.cli.reports.plan import _step

pytestmark = pytest.mark.usefixtures("drafting")

MB = 1_000_000


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama that was trained on 4,096 tokens."""
    return tiny_llama(tmp_path_factory.mktemp("plan") / "tiny.gguf", n_ctx_train=4096, n_embd=128)


@pytest.fixture(autouse=True)
def _no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Don't count what other tests in this process have held; two commands find the same process, as in a shell."""
    monkeypatch.setattr("edgedec_apps.base_memory.resident_bytes", lambda: 60 * MB)
    monkeypatch.setattr("edgedec.memory.planner.peak_resident_bytes", lambda: 0)


def plan(model: Path, *args: Any) -> Result:
    """Run the command on the cpu runtime, with drafters on."""
    return run_here("plan", model, "--runtime", "cpu", *map(str, args))


def document(model: Path, *args: Any) -> dict[str, Any]:
    """Return what it prints with --json, when it succeeds and says nothing else."""
    result = plan(model, *args, "--json")
    assert result.err == "", result
    return result.document()


def n_bytes(found: dict[str, Any], name: str) -> int:
    """Return the bytes of the term of that name."""
    return sum(term["n_bytes"] for term in found["terms"] if term["name"] == name)


def test_terms_add_up_and_the_kv_cache_is_its_shape(tiny: Path) -> None:
    """The total is the sum of the terms; 2 layers of keys and values, 2 heads of 32 in 2 bytes: 512 a token."""
    found = document(tiny, "--context", 1024, "--draft", "off")
    assert found["total_bytes"] == sum(term["n_bytes"] for term in found["terms"])
    assert n_bytes(found, "KV cache") == 1024 * 512
    assert (found["setting"]["context"], found["setting"]["drafters"]) == (1024, [])
    assert found["given_up"] == []


def test_without_a_cap_the_wishes_are_chosen(tiny: Path) -> None:
    """The context of the model, both drafters, and below it every step down, each smaller than what was wished."""
    found = document(tiny)
    assert (found["setting"]["context"], found["setting"]["drafters"]) == (4096, ["suffix", "common"])
    first, *others = found["alternatives"]
    said = {"context": 4096, "drafting": "suffix + common, at most 15 tokens", "step": ""}
    assert first == {"given_up": [], "total_bytes": found["total_bytes"], "fits": True, "chosen": True} | said
    assert others
    assert all(other["total_bytes"] < first["total_bytes"] and not other["chosen"] for other in others)


@pytest.mark.slow
def test_under_a_cap_the_first_setting_that_fits_is_chosen(tiny: Path) -> None:
    """One byte less than the wishes take gives something up, and the plan is within the cap."""
    cap = document(tiny)["total_bytes"] - 8 * MB
    found = document(tiny, "--memory", cap)
    assert found["total_bytes"] <= cap
    assert found["given_up"]
    chosen = [other for other in found["alternatives"] if other["chosen"]]
    assert [other["total_bytes"] for other in chosen] == [found["total_bytes"]]
    assert not found["alternatives"][0]["fits"]


def test_what_was_asked_for_by_name_is_not_given_up(tiny: Path) -> None:
    """A context and a drafter that were named stay in every alternative."""
    cap = document(tiny)["total_bytes"]  # without the reserve, which grows with the cap
    found = document(tiny, "--memory", cap, "--context", 4096, "--draft", "suffix")
    assert (found["setting"]["context"], found["setting"]["drafters"]) == (4096, ["suffix"])
    given_up = [phrase for other in found["alternatives"] for phrase in other["given_up"]]
    assert not any("context" in phrase or "drafting" in phrase for phrase in given_up)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("free_mb", "flags"),
    [
        (100_000, {}),
        (100_000, {"draft": "off", "context": 300}),
        (100_000, {"draft": "suffix+model"}),
        (100_000, {"memory": "95MB", "draft_option": ["max=9"]}),
        (100_000, {"memory": "76MB", "kv_type": "auto"}),
        (100_000, {"memory": "90MB", "draft": "suffix+model"}),
        (100_000, {"memory": "76MB", "draft": "off"}),
        (25, {}),  # the system is short of memory: its free memory is the cap
        (25, {"draft": "common"}),
    ],
)
def test_the_plan_is_that_of_a_run(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_mb: int, flags: dict[str, Any]
) -> None:
    """Runtime, context, rows, drafters, what is given up and, under a cap, each term to the byte."""
    monkeypatch.setattr("edgedec.memory.planner.resident_bytes", lambda: 60 * MB)
    for module in ("planner", "setting"):
        monkeypatch.setattr(f"edgedec.memory.{module}.available_bytes", lambda: free_mb * MB)
    if "model" in flags.get("draft", ""):
        flags = flags | {"draft_option": [f"model={tiny_llama(tmp_path / 'small.gguf', n_layer=1)}"]}
    words = {name: value[0] if isinstance(value, list) else value for name, value in flags.items()}
    said = document(tiny, *(word for name in words for word in (f"--{name.replace('_', '-')}", words[name])))
    asked, quiet = LoadFlags(runtime="cpu", **flags), OutputFlags(quiet=True)
    with open_model(str(tiny), asked, quiet, CancelToken(), one_request=True, keeps_prompts=True) as m:
        slot, terms = m.pool.slots[0], [(term.name, term.n_bytes) for term in m.plan.terms]
        assert (said["setting"]["runtime"], said["setting"]["context"]) == (m.card.runtime, m.n_ctx)
        assert said["setting"]["drafters"] == ([] if slot.drafting is None else [*slot.drafting.factories])
        assert said["given_up"] == [*m.plan.given_up]
        assert bool(terms) == ("memory" in flags or free_mb < 1000)
        if terms:
            assert said["setting"]["max_rows"] == slot.forward_rows
            assert [(term["name"], term["n_bytes"]) for term in said["terms"]] == terms


@pytest.mark.slow
def test_a_server_is_planned_with_its_requests(tiny: Path) -> None:
    """--parallel N counts N contexts and what a server keeps between requests, which one prompt does not need."""
    alone, served, twice = document(tiny), document(tiny, "--parallel", 1), document(tiny, "--parallel", 2)
    assert (n_bytes(alone, "draft stores"), n_bytes(served, "draft stores")) == (4 * MB, 32 * MB)
    assert 2 * n_bytes(served, "KV cache") == n_bytes(twice, "KV cache") == 2 * 4096 * 512
    refused = plan(tiny, "--parallel", 0)
    assert (refused.code, refused.out) == (40, b"")
    assert "--parallel is 0; it must be at least 1" in refused.err


@pytest.mark.slow
def test_it_says_what_is_held_with_a_short_text(tiny: Path) -> None:
    """What grows with texts is not held at first: the KV cache, attention's sums, the text's index, what is kept."""
    found = document(tiny)
    grows = ("KV cache", "prompt cache", "sums of attention", "index of the text", "draft stores")
    assert found["total_bytes"] - found["start_bytes"] == sum(n_bytes(found, name) for name in grows)
    assert "with a short text, " in plan(tiny).text


def test_each_line_is_one_state(tiny: Path) -> None:
    """What each setting holds and costs, without another line; what is taken stands there as it stands above."""
    cap = document(tiny)["total_bytes"] - 2 * MB
    found = document(tiny, "--memory", cap)
    states, chosen = found["alternatives"], next(each for each in found["alternatives"] if each["chosen"])
    assert (chosen["context"], chosen["given_up"]) == (found["setting"]["context"], found["given_up"])
    assert [each["total_bytes"] for each in states] == sorted((each["total_bytes"] for each in states), reverse=True)
    facts, table = plan(tiny, "--memory", cap).text.split("What else could be held, a line for each")
    lines = table.splitlines()[2:]
    assert all(words in facts for words in ("KV cache", "runtime         cpu", "at most 15 tokens", "changed to fit"))
    assert len(lines) == len(states)
    for line, state in zip(lines, states, strict=True):
        assert f" {state['context']} " in line
        assert state["drafting"].replace("at most", "up to") in line
        assert ("fits" if state["fits"] else "too much") in line
        assert ("draft stores cut" in line) == any("draft stores" in phrase for phrase in state["given_up"])


@pytest.mark.parametrize(
    ("slowdown", "said"), [(1.0, ""), (1.074, "1.07 times"), (float("inf"), "an unknown number of times")]
)
def test_a_line_says_what_it_costs_in_speed(slowdown: float, said: str) -> None:
    """By measured rates, or that there are none."""
    assert _step(slowdown) == said


@pytest.mark.slow
def test_it_says_on_which_runtime_and_with_how_long_drafts(tiny: Path) -> None:
    """In the table and with --json."""
    found = document(tiny, "--draft-option", "max=9")["setting"]
    assert (found["runtime"], found["runtime_reason"], found["max_rows"]) == ("cpu", "", 10)
    text = plan(tiny, "--draft-option", "max=9").text
    assert "cpu" in text
    assert "suffix + common, at most 9 tokens" in text


@pytest.mark.slow
def test_what_was_held_to_plan_counts(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a vocabulary took more to check than the model would."""
    cap = document(tiny)["total_bytes"] + 10 * MB
    monkeypatch.setattr("edgedec.memory.planner.peak_resident_bytes", lambda: cap + MB)
    result = plan(tiny, "--memory", cap)
    assert result.code == 50
    assert "before anything is loaded" in result.text


@pytest.mark.slow
def test_a_cap_too_small_is_refused_with_the_table(tiny: Path) -> None:
    """Exit code 50, what the smallest takes and what to do; the table is printed all the same."""
    result = plan(tiny, "--memory", "5MB")
    assert result.code == 50
    assert "the model needs" in result.err
    assert "5.0 MB" in result.err
    assert "interpreter and libraries" in result.text
    found = json.loads(plan(tiny, "--memory", "5MB", "--json").out)
    assert not found["fits"]
    assert not any(other["fits"] for other in found["alternatives"])


@pytest.mark.parametrize("size", ["many", "-3MB", "0", ""])
def test_a_cap_that_is_no_size_is_refused(tiny: Path, size: str) -> None:
    """A usage error that says what sizes look like."""
    result = run_here("plan", tiny, f"--memory={size}")
    assert result.code != 0
    assert result.out == b""
    assert f"{size!r} is no size" in result.err


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    """As with every command."""
    result = run_here("plan", tmp_path / "none.gguf", "--offline")
    assert result.code != 0
    assert "none.gguf" in result.err
