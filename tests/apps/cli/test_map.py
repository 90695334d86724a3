"""edgedec map: a line for each row, whole and in order, and a file that a later run goes on with."""

import json
import re
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.processes.command_line import Result, interrupt_when, run_here

import edgedec
from edgedec.errors import StorageError
from edgedec_apps.cli.mapped_file import add_line

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}},
    "required": ["a"],
    "additionalProperties": False,
}
ROOT = Path(__file__).parents[3]
ROWS = [{"name": name, "age": age} for age, name in enumerate(["Ada", "Bo", "Cy", "Dee", "Eve"] * 4)]


class Place:
    """A folder with rows and a schema, and the command on them."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.model, self.rows, self.out, self.schema = model, folder / "r.jsonl", folder / "o.jsonl", folder / "s.json"
        self.rows.write_text("\n".join(map(json.dumps, ROWS)))
        self.schema.write_text(json.dumps(SCHEMA))

    def run(self, *words: Any, prompt: str = "Sort {name}, {age}") -> Result:
        """Run the command with an output file."""
        schema = () if "--grammar" in words else ("--json-schema", self.schema)
        return run_here("map", self.model, self.rows, "-p", prompt, "--seed", "1", *schema, "-o", self.out, *words)

    def lines(self) -> Sequence[dict[str, Any]]:
        """Return what the output holds."""
        return [json.loads(line) for line in self.out.read_text().splitlines()]


@pytest.fixture
def place(tmp_path: Path, model: Path) -> Place:
    return Place(tmp_path, model)


def test_a_line_for_each_row(place: Place) -> None:
    """Answers as JSON, == those of chat(); a later run with the same settings asks nothing and changes nothing."""
    assert place.run("--system", "S").code == 0
    with edgedec.load(place.model, runtime="reference", draft="off") as engine:
        chats = [
            [{"role": "system", "content": "S"}, {"role": "user", "content": f"Sort {row['name']}, {row['age']}"}]
            for row in ROWS
        ]
        expected = [json.loads(engine.chat(chat, json_schema=SCHEMA, seed=1).text) for chat in chats]
    assert [(line["row"], line["output"]) for line in place.lines()] == list(enumerate(expected, 1))
    before = place.out.read_bytes()
    assert "20 rows in" in place.run("--system", "S").err
    assert place.out.read_bytes() == before
    printed = run_here("map", place.model, "-", "--grammar", "regex:a+b", "--seed", "1", stdin=b"one\n\ntwo")
    assert [json.loads(line)["row"] for line in printed.out.splitlines()] == [1, 3]
    assert all(set(json.loads(line)["output"]) <= {"a", "b"} for line in printed.out.splitlines())


def test_it_goes_on_where_it_stopped(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at the third row, then a kill within a line: the file has whole lines, and ends as in one run."""
    place.run()
    whole = place.out.read_bytes()
    place.out.unlink()
    with monkeypatch.context() as patch:
        interrupt_when(patch, lambda progress: progress.phase == "map" and progress.done == 3, signal.SIGINT)
        result = place.run("--parallel", "1")
    n_done = len(place.lines())  # the third, and what was answered beyond it by then
    result.failed(130, f"interrupted: {n_done} of 20 rows are in", "the same command goes on from there")
    assert 3 <= n_done <= 12
    assert place.out.read_bytes() == b"".join(whole.splitlines(keepends=True)[:n_done])
    assert place.run().code == 0
    assert place.out.read_bytes() == whole
    place.out.write_bytes(whole[: whole.rindex(b'"output"')])
    assert place.run().code == 0
    assert place.out.read_bytes() == whole
    with place.rows.open("a") as file:
        file.write('\n{"name": "Gil", "age": 9}')
    assert place.run("--parallel", "3").code == 0
    assert (place.out.read_bytes().startswith(whole), len(place.lines())) == (True, 21)


def test_an_output_of_something_else_is_left_alone(place: Place) -> None:
    """Other settings, prompts, rows or files are refused by name, and the file stays as it is."""
    place.run()
    whole = place.out.read_bytes()
    place.run("-t", "0").failed(40, "o.jsonl, line 1, was written with another schema or system message")
    place.run("--system", "S").failed(40, "was written with another schema or system message")
    place.run(prompt="Say {name}").failed(40, "was written with another prompt or row")
    place.rows.write_text(json.dumps(ROWS[0]))
    place.run().failed(40, "has 20 answers for 1 rows")
    assert place.out.read_bytes() == whole
    for content in (b"my own notes", b"[]\n", b'{"key": 3}\n', b"\xff\n"):
        place.out.write_bytes(content)
        place.run().failed(40, "o.jsonl, line 1, is no answer of edgedec map; name another --out")
        assert place.out.read_bytes() == content


def test_another_process_writes_the_same_file(place: Place) -> None:
    """A line is added to what the earlier ones left, else the file stays as it is; a device is written, not read."""
    assert add_line(place.out, "a\n", 0) == 2
    with pytest.raises(StorageError, match="another process"):
        add_line(place.out, "b\n", 0)
    assert add_line(place.out, "b\n", 2) == 4 == len(place.out.read_text())
    place.out = Path("/dev/full")
    place.run().failed(60, "/dev/full could not be written: No space left")


def test_errors_of_rows_have_lines(place: Place) -> None:
    """A row without a value, one that is no JSON, and one that is too long, beside one with an answer."""
    place.rows.write_text('{"name": "a"}\n{"age"\n{"name": "b", "age": "%s"}\n{"name": "c", "age": 1}' % ("9" * 3000))
    place.run().failed(40, "3 of 4 rows have no answer; their lines in", "o.jsonl say why")
    errors = [line.get("error", "") for line in place.lines()]
    assert errors[0] == "the row has no 'age'; it has 'name'"
    assert errors[1].startswith("the row is no JSON")
    assert "context" in errors[2]
    assert place.lines()[3]["output"]["a"] in ("x", "yy")
    place.run().failed(40, "3 of 4 rows have no answer")  # they are counted when nothing is left to do, too


def test_what_is_cut_is_an_error_of_the_row(place: Place) -> None:
    """By --max-tokens, or by a stop string: half a JSON is no output."""
    place.run("--max-tokens", "3").failed(40, "20 of 20 rows")
    assert "the text was cut after 3 tokens" in place.lines()[0]["error"]
    place.out.unlink()
    place.run("--stop", ":").failed(40, "20 of 20 rows")
    assert place.lines()[0]["error"] == "the text ends at ':', before its grammar allowed an end"


def test_what_is_refused(place: Place, tmp_path: Path) -> None:
    """A prompt without a place, no rows, a schema that is none, and a folder that there is none of."""
    place.run(prompt="Sort").failed(40, "--prompt has no place for a row: write {text}")
    place.run("--method", "vote").failed(40, "vote")
    place.run("-o", tmp_path / "none" / "o").failed(60, "there is no directory")
    place.schema.write_text('{"type": 3}')
    place.run().failed(40, "JSON schema")
    place.rows.write_text("\n")
    place.run("--grammar", "regex:a").failed(40, "there are no rows; write one a line")
    assert not place.out.exists()


def test_the_page_of_documents_holds(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands and the program of docs/programs.md run as they stand there, with a tiny model."""
    monkeypatch.chdir(tmp_path)
    Path("tickets.txt").write_text("The invoice is wrong.\nMy parcel is late.\n")
    Path("people.jsonl").write_text('{"name": "Ada", "age": 36}\n{"name": "Bo"}\n')
    Path("team.json").write_text(json.dumps(SCHEMA))
    blocks = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs/programs.md").read_text(), re.DOTALL)
    results = [
        run_here(*shlex.split(words.replace("MODEL", str(model))), "-n", "20", stdin=b"a\nb\n")
        for kind, text in blocks
        for words in re.findall(r"edgedec (map .*)", text if kind == "sh" else "")
    ]
    assert [result.code for result in results] == [0, 40, 0]
    teams, greetings = (
        [*map(json.loads, Path(name).read_text().splitlines())] for name in ("teams.jsonl", "greetings.jsonl")
    )
    assert [line["output"]["a"] in ("x", "yy") for line in teams] == [True, True]
    assert greetings[1]["error"] == "the row has no 'age'; it has 'name'"
    assert {json.loads(line)["output"] for line in results[2].out.splitlines()} <= {"yes", "no"}
    code = next(text for kind, text in blocks if kind == "python" and "map_prompts" in text)
    exec(code, {"path": model, "texts": ["one", "two"]})
