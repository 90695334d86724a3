"""The pictures of bench, plan and eval: what is drawn is read back from the SVG, by the axes' own ticks."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.models.tiny_models import tiny_llama
from support.processes.command_line import run_here

from edgedec_apps.bench import plot as bench_plot
from edgedec_apps.cli.reports.plan import write_plot as write_plan
from edgedec_apps.evaluation.plot import Point
from edgedec_apps.evaluation.plot import write_plot as write_eval

pytest.importorskip("matplotlib")

pytestmark = pytest.mark.slow

SVG = "{http://www.w3.org/2000/svg}"
TASKS = ("chat", "a $\\frac{1}\n<b>\x01")  # the second is no formula, no markup, and one line


class Drawn:
    """An SVG that matplotlib wrote."""

    def __init__(self, path: Path) -> None:
        self.root = ElementTree.parse(path).getroot()

    @property
    def texts(self) -> list[str]:
        return ["".join(node.itertext()).strip() for node in self.root.iter(f"{SVG}text")]

    def ids(self, beginning: str) -> list[str]:
        return [name for node in self.root.iter() if (name := node.get("id", "")).startswith(beginning)]

    def group(self, name: str) -> ElementTree.Element:
        """The group of an id, which occurs once."""
        (found,) = [node for node in self.root.iter(f"{SVG}g") if node.get("id") == name]
        return found

    def corners(self, name: str) -> list[tuple[float, float]]:
        """The points of the path or the place of the marker in a group."""
        node = self.group(name)
        if (path := next(node.iter(f"{SVG}path"), None)) is not None and not list(node.iter(f"{SVG}use")):
            numbers = [float(number) for number in re.findall(r"-?[0-9.]+", path.attrib["d"])]
            return list(zip(numbers[::2], numbers[1::2], strict=True))
        return [(float(use.attrib["x"]), float(use.attrib["y"])) for use in node.iter(f"{SVG}use")]

    def value(self, pixel: float, axis: str, axes: int = 1) -> float:
        """What a coordinate stands for on an axis, "x" or "y", by the texts of its ticks."""
        (low_pixel, low), *_, (high_pixel, high) = self._ticks(axis, axes)
        return low + (pixel - low_pixel) / (high_pixel - low_pixel) * (high - low)

    def ends(self, name: str, axis: str, axes: int = 1) -> tuple[float, float]:
        """The least and the greatest value of a group on an axis."""
        values = [self.value(corner["xy".index(axis)], axis, axes) for corner in self.corners(name)]
        return min(values), max(values)

    def first_tick(self, axis: str, axes: int = 1) -> float:
        return self._ticks(axis, axes)[0][1]

    def _ticks(self, axis: str, axes: int) -> list[tuple[float, float]]:
        return list(self._each_tick(axis, axes))

    def _each_tick(self, axis: str, axes: int) -> Iterator[tuple[float, float]]:
        for node in self.group(f"axes_{axes}").iter(f"{SVG}g"):
            if node.get("id", "").startswith(f"{axis}tick_"):
                text = "".join(next(node.iter(f"{SVG}text")).itertext()).strip()
                *_, use = node.iter(f"{SVG}use")
                yield float(use.attrib[axis]), float(text.replace("\u2212", "-"))


def near(*values: float) -> Any:
    """What is read from a picture, whose coordinates have six digits."""
    return pytest.approx(values, rel=1e-4, abs=1e-4)


def benchmark(**changes: Any) -> dict[str, Any]:
    """A benchmark's JSON object of two tasks, beside llama.cpp."""
    head = {"model": "m $1$.gguf", "runtime": "cpu", "draft": "auto", "threads": 2, "max_tokens": 9, "temperature": 0.0}
    head |= {"top_p": None, "warm_store": False, "interrupted": False}
    tasks = {TASKS[0]: {"tok_s": 31.0, "plain_tok_s": 20.0}, TASKS[1]: {"tok_s": 12.0, "plain_tok_s": None}}
    by_task = {TASKS[0]: {"tok_s": 18.0, "lookup_tok_s": None}, TASKS[1]: {"tok_s": 17.0, "lookup_tok_s": None}}
    llamacpp = {"tok_s": 17.5, "lookup_tok_s": None, "lookup_reason": "no", "tasks": by_task}
    speeds = {"tasks": tasks, "all": {"tok_s": 25.0, "plain_tok_s": 20.0}, "against": {"llamacpp": llamacpp}}
    return head | speeds | {"noise": {"lowest": 0.8, "highest": 1.1}} | changes


def test_a_benchmark_is_drawn_as_it_was_measured(tmp_path: Path) -> None:
    """Each bar reaches from zero to its speed, its noise from a fourth less to a fourth more; no speed, no bar."""
    bench_plot.write_plot(tmp_path / "b.svg", benchmark())
    drawn = Drawn(tmp_path / "b.svg")
    assert drawn.first_tick("y") == 0
    speeds = {"bar-0-0": 31.0, "bar-0-1": 12.0, "bar-0-2": 25.0, "bar-1-0": 20.0, "bar-1-2": 20.0}
    speeds |= {"bar-2-0": 18.0, "bar-2-1": 17.0, "bar-2-2": 17.5}
    assert sorted(drawn.ids("bar-")) == sorted(speeds)
    for name, speed in speeds.items():
        assert drawn.ends(name, "y") == near(0.0, speed)
        assert drawn.ends(name.replace("bar", "noise"), "y") == near(speed / 1.25, speed * 1.25)
        assert f"{speed:.1f}" in drawn.texts
    assert {"chat", "a $\\frac{1}␊<b>␁", "all", "edgedec, draft auto", "edgedec, plain", "llamacpp"} <= {*drawn.texts}
    assert "llamacpp, prompt lookup" not in drawn.texts
    assert "tokens per second, after the first token" in drawn.texts
    assert "black: noise; two plain measurements of a task differed by up to 25.0 %" in drawn.texts


def test_without_a_second_measurement_no_noise_is_drawn(tmp_path: Path) -> None:
    """A benchmark that measured nothing twice has no bars of noise, and says so; the same figures, the same file."""
    found = benchmark(noise={"lowest": None, "highest": None}, against={})
    for name in ("a.svg", "b.svg"):
        bench_plot.write_plot(tmp_path / name, found)
    drawn = Drawn(tmp_path / "a.svg")
    assert drawn.ids("noise-") == []
    assert "no two measurements of the same work to tell the noise by" in drawn.texts
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_an_axis_has_its_numbers_in_full(tmp_path: Path) -> None:
    """Where a moment of the machine made the noise 100,000 times the speed, no power of ten stands beside the axis."""
    bench_plot.write_plot(tmp_path / "b.svg", benchmark(noise={"lowest": 1.0, "highest": 100_000.0}))
    drawn = Drawn(tmp_path / "b.svg")
    assert drawn.ends("noise-0-0", "y")[1] == pytest.approx(3_100_000, rel=1e-4)
    assert not any(re.fullmatch(r"\d(\.\d+)?e\d+", text) for text in drawn.texts)


@pytest.mark.parametrize(("cap", "line"), [(400_000_000, (400.0, 400.0)), (90_000_000_000, None), (None, None)])
def test_a_plan_is_drawn_to_scale(tmp_path: Path, cap: int | None, line: tuple[float, float] | None) -> None:
    """Each term begins where the one before it ends, the total at zero; a cap far beyond is said, not drawn."""
    terms = [("weights", 200_000_000, False), ("KV cache", 50_000_000, True), ("logits", 1_000_000, False)]
    rows = [{"name": name, "n_bytes": n_bytes, "grows": grows} for name, n_bytes, grows in terms]
    document = {"model": "m", "setting": {"context": 512}, "terms": rows, "total_bytes": 251_000_000}
    document |= {"cap_bytes": cap, "cap_name": "allowed", "partial": False}
    write_plan(tmp_path / "p.svg", document)
    drawn = Drawn(tmp_path / "p.svg")
    assert drawn.first_tick("x") == 0
    assert drawn.ends("term-0", "x") == near(0, 200)
    assert drawn.ends("term-1", "x") == near(200, 250)
    assert drawn.ends("term-2", "x") == near(250, 251)
    assert drawn.ends("total", "x") == near(0, 251)
    assert {"weights", "KV cache (grows)", "total", "251.0 MB", "50.0 MB"} <= {*drawn.texts}
    assert (drawn.ends("cap", "x") if drawn.ids("cap") else None) == (None if line is None else near(*line))
    assert any("beyond the axis" in text for text in drawn.texts) == (cap is not None and line is None)


def test_an_evaluation_is_drawn_with_its_errors(tmp_path: Path) -> None:
    """Points at their figures, two standard errors around them, but never below zero; the axes begin at zero."""
    points = [
        Point("a", "f16 (baseline)", 20.0, 1.0, 0.0, 0.0, 0.0, (18.0, 21.0)),
        Point("b", "f16, skip 1.2", 24.0, 0.92, 0.09, 0.01, 0.06, (22.5, 25.0)),
        Point("c", "one window", 25.0, 0.9, 0.1),
    ]
    write_eval(tmp_path / "e.svg", points, "a title")
    drawn = Drawn(tmp_path / "e.svg")
    for axes, name, places in ((1, "top1", [0, 8, 10]), (2, "kl", [0, 0.09, 0.1])):
        assert drawn.first_tick("x", axes) == drawn.first_tick("y", axes) == 0
        for index, (point, place) in enumerate(zip(points, places, strict=True)):
            assert drawn.ends(f"point-{name}-{index}", "x", axes) == near(point.tok_s, point.tok_s)
            assert drawn.ends(f"point-{name}-{index}", "y", axes) == near(place, place)
    assert drawn.ends("error-top1-1", "y") == near(6, 10)
    assert drawn.ends("error-kl-1", "y", 2) == near(0, 0.21)
    assert drawn.ends("speed-top1-1", "x") == near(22.5, 25.0)
    assert drawn.ends("error-top1-2", "y") == near(10, 10)
    assert {"other top-1 than the baseline, %", "KL from the baseline, nats", "tokens per second"} <= {*drawn.texts}
    assert "b  f16, skip 1.2" in drawn.texts


# The commands


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("pictures") / "tiny.gguf", n_ctx_train=2048)


def test_bench_draws_what_it_prints(model: Path, tmp_path: Path) -> None:
    """The bars of the picture are the speeds of the JSON object."""
    out, prompts = tmp_path / "bench.svg", tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "a", "task": "chat", "turns": ["Hello"]}) + "\n")
    args = ("--runtime", "cpu", "--prompts", prompts, "-n", 4, "--temperature", "0", "--plot", out, "--json", "-q")
    result = run_here("bench", model, *map(str, args))
    assert (result.code, result.err) == (0, ""), result
    found = json.loads(result.out)
    drawn = Drawn(out)
    assert drawn.ends("bar-0-0", "y") == near(0, found["tasks"]["chat"]["tok_s"])
    assert drawn.ends("bar-1-1", "y") == near(0, found["all"]["plain_tok_s"])


def test_plan_draws_what_it_prints(model: Path, tmp_path: Path) -> None:
    """The total of the picture is that of the JSON object; a plan that does not fit is drawn, too."""
    out = tmp_path / "plan.svg"
    result = run_here("plan", model, "--runtime", "cpu", "--plot", out, "--json")
    assert (result.code, result.err) == (0, ""), result
    found = json.loads(result.out)
    assert Drawn(out).ends("total", "x") == near(0, found["total_bytes"] / 1e6)
    assert len(Drawn(out).ids("term-")) == len(found["terms"])
    out.unlink()
    assert run_here("plan", model, "--runtime", "cpu", "--plot", out, "--memory", "1MB").code == 50
    assert Drawn(out).ends("cap", "x") == near(1, 1)


def test_eval_draws_what_it_prints(model: Path, tmp_path: Path) -> None:
    """The points of the picture are the figures of the JSON object, in a PNG's place of an earlier file, too."""
    text, out = tmp_path / "text.txt", tmp_path / "pictures" / "eval.svg"
    text.write_text("The ferry left at ten past six, eleven minutes late. " * 3)
    out.parent.mkdir()
    args = ("--text", text, "--window", 40, "--layers", "all", "--layers", "0", "--json", "-q", "--plot")
    result = run_here("eval", model, *map(str, args), out)
    assert (result.code, result.err) == (0, ""), result
    row = json.loads(result.out)["rows"][1]
    drawn = Drawn(out)
    assert drawn.ends("point-top1-1", "y") == near(*[100 * (1 - row["top1"])] * 2)
    assert drawn.ends("point-kl-1", "y", 2) == near(*[row["kl_mean"]] * 2)
    assert drawn.ends("point-kl-1", "x", 2) == near(*[row["tok_s"]] * 2)
    assert drawn.ends("speed-kl-1", "x", 2) == near(*row["tok_s_range"])
    png = out.with_name("eval.png")
    png.write_text("an earlier one")
    assert run_here("eval", model, *map(str, args), png).code == 0
    data = png.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (1350, 675)
    assert sorted(out.parent.iterdir()) == [png, out]


@pytest.mark.parametrize("command", ["bench", "plan", "eval"])
def test_what_could_not_be_drawn_is_refused_first(
    model: Path, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another ending, a folder that is not there, and matplotlib that is not there, before any work."""
    run_here(command, model, "--plot", tmp_path / "a.pdf").failed(40, "a.pdf", "ends in .svg or .png")
    run_here(command, model, "--plot", tmp_path / "no" / "a.svg").failed(60, "no directory")
    monkeypatch.setattr("edgedec_apps.plots.find_spec", lambda name: None)
    run_here(command, model, "--plot", tmp_path / "a.svg").failed(30, 'pip install "matplotlib>=3.8"')
    assert list(tmp_path.iterdir()) == []
