"""edgedec eval: its figures against plain numpy, the windows, and what the command prints and refuses."""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from support.models.tiny_models import BOS, byte_ids, tiny_llama
from support.processes.command_line import interrupt_when, run_here

import edgedec
from edgedec.errors import RequestError
from edgedec.gguf.layer_bytes import layer_bytes
from edgedec.model import Forward, LayerSet, Session
from edgedec.model_card import Capabilities
from edgedec.progress import CancelToken
from edgedec.tokenizer import added_around
from edgedec_apps.evaluation.evaluate import (
    DEFAULT_TEXT,
    Distribution,
    Lane,
    Samples,
    cut_windows,
    divergence,
    evaluate,
    read_row,
    standard_error,
    summarize,
)
from edgedec_apps.evaluation.plot import Point, points, text_plot
from edgedec_apps.evaluation.settings import RunSetting, combine, layers_text, parse_layers
from edgedec_runtimes.layer_skip.layer_sets import TunedSet, evenly_spaced, keep_tuned_set, without

TEXT = "The ferry left at ten past six, eleven minutes late."  # 52 tokens of the tiny models
FIGURES = {"ppl", "kl_mean", "kl_p99", "top1", "n_positions", "tok_s", "kl_error", "top1_error", "tok_s_range"}
ROW = FIGURES | {"share", "left_out", "settings"}

Rows = NDArray[np.float32]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "a text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def document(*args: Any) -> dict[str, Any]:
    """Return what the command prints with --json, when it succeeds and says nothing else."""
    result = run_here("eval", *args, "--json")
    assert result.err == "", result
    return result.document()


# The figures


def plain_logits(model: Path, n_window: int, layers: Sequence[int] | None = None, **options: Any) -> NDArray[Any]:
    """Return f64[n, n_vocab]: the rows that predict the text's tokens, window by window, each in one forward."""
    ids = byte_ids(TEXT)
    parts = [[BOS, *ids[start : start + n_window - 1]] for start in range(0, len(ids), n_window - 1)]
    with edgedec.load(model, runtime="reference", draft=None, n_ctx=n_window, **options) as engine:
        mask = None if layers is None else LayerSet.of(2, layers)
        session = engine.session()
        texts = [np.array(part[:-1], np.int32) for part in parts]
        rows = [session.forward(text, n_past=0, layers=mask, rows="all").logits.astype(np.float64) for text in texts]
    return np.concatenate(rows)


def plain_figures(base: NDArray[Any], here: NDArray[Any]) -> dict[str, float]:
    """Return the figures as their definitions have them."""
    log_p, log_q = (rows - np.log(np.exp(rows).sum(axis=1, keepdims=True)) for rows in (base, here))
    kl = (np.exp(log_p) * (log_p - log_q)).sum(axis=1)
    return {
        "ppl": math.exp(-log_q[np.arange(len(here)), byte_ids(TEXT)].mean()),
        "kl_mean": kl.mean(),
        "kl_p99": np.quantile(kl, 0.99),
        "top1": (base.argmax(axis=1) == here.argmax(axis=1)).mean(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("n_window", [16, 53, 512])
def test_the_figures_are_those_of_plain_numpy(model: Path, text: Path, n_window: int) -> None:
    """Perplexity, mean and 99th percentile of KL and equal top tokens, with layers left out and another KV type."""
    settings = ("--kv-type", "f16", "--kv-type", "f32", "--layers", "all", "--layers", "1")
    found = document(model, "--text", text, "--window", str(n_window), *settings)
    base = plain_logits(model, n_window)
    others = [plain_logits(model, n_window, [1]), plain_logits(model, n_window, kv_type="f32")]
    others.append(plain_logits(model, n_window, [1], kv_type="f32"))
    expected = [plain_figures(base, here) for here in (base, *others)]
    for row, figures in zip(found["rows"], expected, strict=True):
        assert {name: row[name] for name in figures} == pytest.approx(figures, rel=1e-9, abs=1e-12)
        assert row["n_positions"] == 52
    assert 0 < found["rows"][2]["kl_mean"] < 1e-4 < found["rows"][1]["kl_mean"]
    assert found["rows"][1]["top1"] < 1


def read(row: Sequence[float] | Rows) -> Distribution:
    """Return the distribution of finite logits."""
    found = read_row(np.array(row, np.float32))
    assert found is not None
    return found


def test_a_divergence_by_hand() -> None:
    """KL of (1/2, 1/2) from (3/4, 1/4) is ln(2/3)/2 + ln(2)/2; equal logits, and logits shifted alike, have none."""
    p, q, r = map(read, ([0.0, 0.0], [math.log(3), 0.0], [math.log(3) + 8, 8.0]))
    assert (p.best, q.best, q.probs.tolist()) == (0, 0, pytest.approx([0.75, 0.25]))
    assert divergence(p, q) == pytest.approx(math.log(2 / 3) / 2 + math.log(2) / 2, rel=1e-6)
    assert divergence(q, q) == 0
    assert divergence(q, r) == pytest.approx(0, abs=1e-6)


def test_rare_tokens_count_in_full() -> None:
    """A token that f32 exponentials lose against the sum of a large vocabulary still has its share of a divergence."""
    row = np.full(150_000, -30.0, np.float32)
    row[0] = 0.0
    other = row.copy()
    other[1:] -= 1
    rest, less = 149_999 * math.exp(-30), 149_999 * math.exp(-31)
    shift = math.log1p(less) - math.log1p(rest)
    assert divergence(read(row), read(other)) == pytest.approx(shift + rest / (1 + rest), rel=1e-5)


@pytest.mark.parametrize("row", [[0.0, math.nan], [0.0, math.inf], [0.0, -math.inf]])
def test_what_is_not_finite_is_no_distribution(row: list[float]) -> None:
    """A logit that is no number, or infinite, is told, not summed."""
    with np.errstate(invalid="ignore"):
        assert read_row(np.array(row, np.float32)) is None


@pytest.mark.slow
def test_a_model_against_itself(model: Path, text: Path, tmp_path: Path) -> None:
    """A copy of the file, and all layers by name, diverge by exactly 0, with every top token the same."""
    copy = Path(shutil.copy(model, tmp_path / "copy.gguf"))
    for row in document(model, "--text", text, "--against", copy, "--layers", "0-1")["rows"]:
        assert (row["kl_mean"], row["kl_p99"], row["top1"]) == (0.0, 0.0, 1.0)


def test_auto_takes_a_runtime_that_leaves_out_layers(model: Path, text: Path) -> None:
    """Where layers are named, auto is the first runtime, whatever a measurement would have said."""
    assert document(model, "-q", "--text", text, "--runtime", "auto", "--layers", "0")["settings"]["runtime"] == "cpu"


@pytest.mark.slow
def test_two_runtimes(model: Path, text: Path) -> None:
    """The baseline may run on another runtime: the reference is next to llama.cpp, and both are named."""
    args = ("--text", text, "--against-runtime", "llamacpp")
    found = document(model, *args)
    assert [row["settings"]["runtime"] for row in found["rows"]] == ["llamacpp", "reference"]
    assert 0 < found["kl_mean"] < 1e-4
    assert run_here("eval", model, *args).text.endswith("on llamacpp\n")


# Windows and forwards


def test_windows() -> None:
    """Each window begins with the leading tokens; a last one that would predict nothing is left out."""
    assert [w.tolist() for w in cut_windows([5, 6, 7, 8, 9], [], 2)] == [[5, 6], [7, 8]]
    assert [w.tolist() for w in cut_windows([5, 6, 7, 8, 9], [1], 4)] == [[1, 5, 6, 7], [1, 8, 9]]
    assert [w.tolist() for w in cut_windows([5], [1], 512)] == [[1, 5]]
    for ids, leading, n_window in (([5], [], 512), ([], [1], 512), ([5, 6], [1], 1), ([5, 6], [], 1)):
        with pytest.raises(RequestError):
            cut_windows(ids, leading, n_window)


@pytest.mark.parametrize(("special", "expected"), [([[], []], []), ([[1], []], [1]), ([[1], [2]], [1])])
def test_leading_tokens(special: list[list[int]], expected: list[int]) -> None:
    """What the tokenizer puts before a text is found, with or without something behind it."""

    def encode(_text: str, *, add_special: bool = True) -> list[int]:
        return [*special[0], 7, *special[1]] if add_special else [7]

    assert added_around(cast(Any, SimpleNamespace(encode=encode)))[0] == expected


class Scripted:
    """A session whose row at a position is given; notes its forwards as (n_past, number of tokens)."""

    def __init__(self, rows: Sequence[Sequence[float]], max_rows: int = 64) -> None:
        self._rows = np.array(rows, np.float32)
        card = SimpleNamespace(n_vocab=self._rows.shape[1])
        self.model = SimpleNamespace(card=card, capabilities=Capabilities(max_rows=max_rows))
        self.calls: list[tuple[int, int]] = []

    def forward(self, tokens: NDArray[np.int32], *, n_past: int, layers: Any = None, rows: str = "last") -> Forward:
        assert rows == "all" or len(tokens) == 1
        self.calls.append((n_past, len(tokens)))
        return Forward(self._rows[n_past : n_past + len(tokens)])

    def cancel(self) -> None:
        """Nothing runs."""


def lane(session: Scripted, name: str = "f16") -> Lane:
    """Return a lane of a scripted session."""
    return Lane(name, cast(Session, session))


def test_rows_come_in_pieces_and_the_last_one_by_one() -> None:
    """Of nine rows, the first six come in forwards of at most the rows allowed, the last three singly, in both."""
    logits = np.random.default_rng(0).normal(size=(9, 4)).tolist()
    few, many = Scripted(logits, max_rows=4), Scripted(logits, max_rows=64)
    window = np.arange(10, dtype=np.int32) % 4
    reading = evaluate([lane(many), lane(few)], [window], CancelToken(), n_rows=5, n_steps=3)
    assert many.calls == few.calls == [(0, 4), (4, 2), (6, 1), (7, 1), (8, 1)]
    assert (reading.n_windows, reading.figures[1].n_positions, reading.figures[1].kl_p99) == (1, 9, 0.0)
    assert (reading.figures[0].tok_s or 0) > 0


def test_a_row_predicts_the_token_after_it() -> None:
    """With a weight of 3 on the token that follows and 1 on the three others, the perplexity is 2."""
    window = np.array([3, 0, 2, 1, 3], np.int32)
    session = Scripted([[math.log(3) if i == token else 0.0 for i in range(4)] for token in window[1:].tolist()])
    for n_steps in (0, 1, 2, 17):
        figures = evaluate([lane(session)], [window, window], CancelToken(), n_rows=2, n_steps=n_steps).figures[0]
        assert figures.ppl == pytest.approx(2, rel=1e-6)
        assert (figures.n_positions, figures.top1) == (8, 1.0)
        assert (figures.tok_s is None) == (n_steps < 2)


def test_logits_that_are_not_finite_are_refused() -> None:
    """The setting whose logits they are is named."""
    good, bad = Scripted([[0.0, 1.0]] * 3), Scripted([[0.0, 1.0], [0.0, math.nan], [0.0, 1.0]])
    with np.errstate(invalid="ignore"), pytest.raises(RequestError, match=r"logits of q8_0 are not finite"):
        evaluate([lane(good), lane(bad, "q8_0")], [np.array([0, 1, 0, 1], np.int32)], CancelToken())


# Settings


def test_layers_are_read() -> None:
    """Ranges in any order become ranges in order, joined where they touch."""
    assert parse_layers("0-11,14-29") == ((0, 11), (14, 29))
    assert parse_layers(" 5, 3-4,0") == ((0, 0), (3, 5))
    assert parse_layers("0-9,2-4") == ((0, 9),)
    assert [layers_text(parse_layers(text)) for text in ("1,2,3,7", "all")] == ["1-3,7", "all"]


def test_settings_are_combined() -> None:
    """Every KV type comes with every set of layers, once."""
    base = RunSetting("m", Path("m"), "cpu")
    names = [one.name for one in combine(base, ["f16", "q8_0", "f16"], [None, ((0, 1), (3, 3))])]
    assert names == ["f16", "f16, layers 0-1,3", "q8_0", "q8_0, layers 0-1,3"]


# The command


def test_json_holds_everything(model: Path, text: Path, tmp_path: Path) -> None:
    """The top has the figures of the setting asked for first, then the baseline, all rows, text and versions."""
    out = tmp_path / "out.json"
    found = document(model, "--text", text, "--window", "30", "--kv-type", "f32", "--threads", "1", "--json-out", out)
    assert found == json.loads(out.read_text())
    more = {"baseline", "rows", "text", "text_sha256", "n_tokens", "n_windows", "interrupted", "versions"}
    assert found.keys() == ROW | more
    assert found["rows"] == [found["baseline"], {name: found[name] for name in ROW}]
    settings = {"model": str(model), "runtime": "reference", "kv_type": "f32", "layers": "all", "layer_skip": None}
    assert found["settings"] == settings | {"window": 30, "threads": 1}
    assert found["baseline"]["settings"] == found["settings"] | {"kv_type": "f16"}
    assert (found["baseline"]["kl_mean"], found["baseline"]["top1"]) == (0.0, 1.0)
    assert (found["text"], found["n_tokens"], found["n_windows"], found["n_positions"]) == (str(text), 52, 2, 52)
    assert found["versions"].keys() >= {"edgedec", "python", "numpy"}
    assert found["interrupted"] is False


def test_the_baseline_alone(model: Path, text: Path) -> None:
    """Without settings, and with the default ones spelled out, there is one row, the baseline's."""
    for args in ((), ("--kv-type", "f16", "--layers", "all")):
        found = document(model, "--text", text, *args)
        assert (found["rows"], found["ppl"]) == ([found["baseline"]], found["baseline"]["ppl"])


@pytest.mark.slow
def test_the_table_goes_to_standard_output(model: Path) -> None:
    """Without --json there is a line for each setting, the baseline's first; the default text serves."""
    args = ("--kv-type", "f16", "--kv-type", "f32", "--layers", "0", "--window", "64", "-n", "100")
    result = run_here("eval", model, *args)
    assert (result.code, result.err) == (0, "")
    heading, _, head, *rows = result.text.splitlines()
    assert "the default text · 100 predictions in 2 windows of at most 64 tokens" in heading
    assert head.split() == ["setting", "bytes", "ppl", "KL", "mean", "KL", "p99", "same", "top-1", "tok/s"]
    assert [row.split("  ")[0] for row in rows[:3]] == ["f16 (baseline)", "f16, layers 0", "f32, layers 0"]


def test_the_default_text_is_long_enough() -> None:
    """It has some 2,200 tokens, at four characters each."""
    assert 8000 < len(DEFAULT_TEXT.read_text(encoding="utf-8")) < 10000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--window", "1"), 40, "--window is 1"),
        (("--window", "4096"), 40, "trained for 2048"),
        (("--max-tokens", "1"), 40, "--max-tokens is 1"),
        (("--layers", "0-5"), 40, "has 2 layers, 0 to 1"),
        (("--layer-skip", "0.9"), 40, "0.9 is no speed-up"),
        (("--layer-skip", "3"), 40, "3 is out of reach"),
        (("--runtime", "llamacpp", "--layer-skip", "1"), 51, "layers"),
        (("--plot", "a.pdf"), 40, "ends in .svg or .png"),
        (("--plot-text", "--json"), 40, "--plot FILE.svg"),
        (("--layers", "1-0"), 40, "'1-0'"),
        (("--layers", "first"), 40, "'first'"),
        (("--layers", "0,99999999999999999999"), 40, "99999999999999999999"),
        (("--kv-type", "q9"), 40, "q9"),
        (("--against", "no such model"), 11, "no such model"),
        (("--against-runtime", "toaster"), 31, "toaster"),
        (("--runtime", "llamacpp", "--layers", "0"), 51, "layers"),
        (("--json-out", "no/such/folder/a.json"), 60, "no/such/folder"),
    ],
)
def test_refusals(model: Path, text: Path, args: tuple[str, ...], code: int, words: str) -> None:
    """What can't be done is refused with what was found, and an exit code of its kind."""
    run_here("eval", model, "--text", text, *args).failed(code, words)


def test_texts_that_are_refused(model: Path, tmp_path: Path) -> None:
    """A text that is absent, not UTF-8 or empty."""
    path = tmp_path / "text.txt"
    run_here("eval", model, "--text", path).failed(60, "text.txt can't be read")
    path.write_bytes(b"caf\xe9")
    run_here("eval", model, "--text", path).failed(40, "not UTF-8", "0xe9")
    path.write_bytes(b"")
    run_here("eval", model, "--text", path).failed(40, "too short", "0 tokens")


@pytest.mark.slow
def test_another_vocabulary_is_refused(model: Path, plain_model: Path, text: Path, tmp_path: Path) -> None:
    """A baseline of 260 tokens for a model of 261 is refused; another model of the same vocabulary is not."""
    args = ("--text", text, "--window", "64", "--against")
    run_here("eval", model, *args, plain_model).failed(40, "261 and 260 tokens")
    other = tiny_llama(tmp_path / "other.gguf", seed=5, n_layer=3, n_vocab=261)
    assert document(model, *args, other)["kl_mean"] > 0.01


# Layers left out for a speed-up


@pytest.fixture(scope="session")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of six layers."""
    return tiny_llama(tmp_path_factory.mktemp("eval") / "layered.gguf", seed=2, n_layer=6, n_ctx_train=1024)


@pytest.mark.slow
def test_a_layer_skip_is_what_running_with_it_leaves_out(layered: Path, text: Path) -> None:
    """Its figures are those of the same layers by name, and the share of the bytes is said."""
    found = document(layered, "--text", text, "--layer-skip", "1.1", "--layer-skip", "1.4", "--layers", "0-1,4-5")
    base, named, one, two = found["rows"]
    figures = ("ppl", "kl_mean", "kl_p99", "top1", "share", "left_out")
    assert [two[name] for name in figures] == [named[name] for name in figures]
    assert [one["left_out"], two["left_out"]] == [[[2, 0], [2, 1]], [[2, 0], [2, 1], [3, 0], [3, 1]]]
    assert [row["settings"]["layer_skip"] for row in found["rows"]] == [None, None, 1.1, 1.4]
    assert (base["share"], base["left_out"], base["kl_mean"]) == (1.0, [], 0.0)
    sizes = layer_bytes(layered)
    assert [one["share"], two["share"]] == [sizes.share(evenly_spaced(6, n)) for n in (1, 2)]
    assert 0 < one["kl_mean"] < two["kl_mean"]


@pytest.mark.slow
def test_the_tuned_set_is_judged_where_it_would_run(layered: Path, text: Path, cache: Path) -> None:
    """A set kept for the model, of as few bytes as are wished for, is what --layer-skip means."""
    layers = without(6, [(1, 1), (4, 1), (3, 0)])
    share = layer_bytes(layered).share(layers)
    with edgedec.load(layered, runtime="reference", draft=None) as engine:
        keep_tuned_set(cache, engine.card, TunedSet(layers, share, 0.8, 0.7, 100), lossy=True)
    (_, row) = document(layered, "--text", text, "--layer-skip", f"{1 / share - 0.001:.4f}")["rows"]
    assert (row["left_out"], row["share"]) == ([[1, 1], [3, 0], [4, 1]], share)


@pytest.mark.slow
def test_a_layer_skip_in_the_table(layered: Path, text: Path) -> None:
    """It stands in the setting's name, with what it means below; alone it comes without another row of all layers."""
    result = run_here("eval", layered, "--text", text, "--layer-skip", "1.4", "--kv-type", "f16", "--kv-type", "f32")
    assert (result.code, result.err) == (0, "")
    rows = [row.split("  ")[0] for row in result.text.splitlines()[3:6]]
    assert rows == ["f16 (baseline)", "f16, skip 1.4", "f32, skip 1.4"]
    assert "skip X: LOSSY" in result.text


@pytest.mark.slow
def test_an_export_is_judged_against_its_source(tmp_path: Path, text: Path) -> None:
    """The baseline runs where its file runs: the export on its own runtime, the GGUF on ours."""
    pytest.importorskip("onnx")
    from support.models.onnx_exports import export_tiny

    exported = export_tiny(tmp_path, "llama", ("Q8_0",), "f32", {})
    args = ("--text", text, "--window", "64", "--runtime", "onnx", "--against", exported.gguf, "-q")
    found = document(exported.folder, *args)
    assert [row["settings"]["runtime"] for row in found["rows"]] == ["cpu", "onnx"]
    assert 0 < found["kl_mean"] < 0.01
    assert found["top1"] > 0.9


# The picture


@pytest.mark.slow
def test_the_picture_in_plain_text(layered: Path, text: Path) -> None:
    """--plot-text draws a letter for each setting behind the table, and names them."""
    args = ("--text", text, "--layer-skip", "1.1", "--layer-skip", "1.4", "--plot-text")
    result = run_here("eval", layered, *args)
    assert (result.code, result.err) == (0, "")
    lines = result.text.splitlines()
    picture = lines[lines.index("same top-1") :]
    assert picture[1].lstrip().startswith("100.0 % |")
    named = [line for line in picture if line[:3] in ("a  ", "b  ", "c  ")]
    assert named == ["a  f16 (baseline)", "b  f16, skip 1.1", "c  f16, skip 1.4"]


def test_places_in_the_picture() -> None:
    """The best is on top, the fastest at the right; two in one place get another mark, and one alone has room."""
    slow, fast = Point("a", "slow", 10.0, 1.0, 0.0), Point("b", "fast", 20.0, 0.5, 1.0)
    drawn = text_plot([slow, fast])
    assert (drawn[1], drawn[14]) == ("100.0 % |a", " 50.0 % |" + " " * 59 + "b")
    assert drawn[16] == "         10.0" + " " * 46 + "20.0 tok/s"
    assert text_plot([slow, fast, Point("c", "as slow", 10.0, 1.0, 0.0)])[1] == "100.0 % |*"
    assert text_plot([slow])[8].endswith("|" + " " * 30 + "a")
    assert text_plot([]) == ["no speed was measured, so there is no picture; give a longer text or window"]


def test_points_are_the_rows_that_were_timed() -> None:
    """The baseline is named as such; a row without a speed keeps its letter to itself."""
    settings: dict[str, Any] = {"kv_type": "f16", "layers": "all", "layer_skip": None}
    timed = {"top1_error": 0.01, "kl_error": 0.02, "tok_s_range": (9.0, 13.0)}
    rows: list[dict[str, Any]] = [
        timed | {"settings": settings, "tok_s": 10.0, "top1": 1.0, "kl_mean": 0.0},
        timed | {"settings": settings | {"layer_skip": 1.2}, "tok_s": None, "top1": 0.9, "kl_mean": 0.1},
        timed | {"settings": settings | {"layers": "0-3"}, "tok_s": 12.0, "top1": 0.8, "kl_mean": 0.2},
    ]
    assert points(rows) == [
        Point("a", "f16 (baseline)", 10.0, 1.0, 0.0, 0.01, 0.02, (9.0, 13.0)),
        Point("c", "f16, layers 0-3", 12.0, 0.8, 0.2, 0.01, 0.02, (9.0, 13.0)),
    ]


def test_error_bars_are_of_windows() -> None:
    """The standard error is that of windows of several lengths, by hand; equal windows have none."""
    windows = [[1.0, 0.0, 0.0], [1.0]]  # a mean of 1/2; sums 1/2 below and above what the mean gives
    assert standard_error(windows) == pytest.approx(math.sqrt((0.25 + 0.25) * 2 / 1) / 4)
    assert standard_error([[0.25, 0.75], [0.5, 0.5]]) == 0.0
    assert standard_error([[0.25, 0.75]]) is None


def test_figures_have_their_errors() -> None:
    """Two windows of one position each: a top-1 of 1/2 ± 1/2, a KL of 2 ± 1; 10 and 20 tokens/s by window."""
    windows = [Samples([0.0], [1.0], [True], [0.1]), Samples([0.0], [3.0], [False], [0.05])]
    found = summarize(windows)
    assert (found.kl_mean, found.kl_error, found.top1, found.top1_error) == (2.0, 1.0, 0.5, 0.5)
    assert found.tok_s_range == (10.0, 20.0)
    alone = summarize(windows[:1])
    assert (alone.kl_error, alone.top1_error, alone.tok_s_range) == (None, None, (10.0, 10.0))


# Interrupts


def interrupt_at(monkeypatch: pytest.MonkeyPatch, n_tokens: int) -> None:
    """Make this process get a Ctrl-C when that many tokens have been evaluated."""
    interrupt_when(monkeypatch, lambda progress: progress.phase == "evaluating" and progress.done >= n_tokens)


def test_ctrl_c_reports_the_windows_that_are_finished(model: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after the first of two windows ends with that one's figures, which say so, and exit code 130."""
    interrupt_at(monkeypatch, 26)
    result = run_here("eval", model, "--text", text, "--window", "27", "--layers", "0", "--json")
    assert (result.code, result.err) == (130, "edgedec: interrupted\n")
    found = json.loads(result.out)
    assert (found["interrupted"], found["n_windows"], found["n_positions"], len(found["rows"])) == (True, 1, 26, 2)


def test_ctrl_c_in_the_first_window(model: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to report yet."""
    interrupt_at(monkeypatch, 1)
    run_here("eval", model, "--text", text, "--json").failed(130, "before a window was finished")


# A real model


@pytest.mark.slow
@pytest.mark.model
def test_a_real_model(smollm_path: Path) -> None:
    """A KV cache of q8_0 costs next to nothing, two layers left out cost much, on a text of a few hundred tokens."""
    args = ("--kv-type", "f16", "--kv-type", "q8_0", "--layers", "all", "--layers", "0-11,14-29")
    found = document(smollm_path, "--runtime", "cpu", "-q", "-n", "300", "--window", "150", *args)
    plain, cut, coarse, _ = found["rows"]
    assert found["n_positions"] == 298
    assert 5 < plain["ppl"] < 60
    assert 0 < coarse["kl_mean"] < 0.01 < cut["kl_mean"]
    assert coarse["top1"] > 0.9 > cut["top1"]
    assert plain["ppl"] * 1.05 < cut["ppl"]
