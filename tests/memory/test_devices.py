"""Memory by device: how layers are split among simulated devices under two caps, and what the plan says of it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.models.real_models import real_model

from edgedec.errors import MemoryCapError
from edgedec.gguf.file import read_gguf
from edgedec.load_options import LoadOptions
from edgedec.load_plan import LoadPlan
from edgedec.memory.planner import all_plans, plan_within
from edgedec.memory.setting import Cap
from edgedec.memory.terms import device_caps
from edgedec.memory_plan import HOST, Device, DeviceCap, IsOver, MemoryPlan, MemoryTerm, Split, n_split
from edgedec.scheduler.drafter_factories import drafter_factories
from edgedec_runtimes.llamacpp.device_terms import HostRun, compute_bytes, default_split, kv_terms, weight_terms
from edgedec_runtimes.llamacpp.options import LlamaCppOptions, llamacpp_options
from edgedec_runtimes.shared.device_account import remember_drivers, with_account, with_measured_drivers
from edgedec_runtimes.shared.layer_split import split_layers, whole_split

MB, MIB = 1_000_000, 2**20
CUDA0 = Device("CUDA0", "CUDA", 8_000 * MB, 7_000 * MB, driver_bytes=400 * MB)
JETSON = replace(CUDA0, unified=True, free_bytes=6_000 * MB)
NEAR, FAR = replace(CUDA0, name="NEAR", driver_bytes=0), replace(CUDA0, name="FAR", backend="RPC", driver_bytes=0)


class Layered:
    """A runtime that only plans: 28 layers of 50 MB and an output of 80 MB, 10 kB of KV a layer and token."""

    name = "llamacpp"
    own_options = LlamaCppOptions

    def __init__(self, *devices: Device) -> None:
        self.found = devices

    def accepts(self, path: Path) -> str | None:
        return None

    def devices(self, options: LoadOptions) -> tuple[Device, ...]:
        return self.found

    def split(self, names: Sequence[str], n_layers: int, is_over: IsOver, *, whole: bool) -> Split:
        return whole_split(names, n_layers, is_over) if whole else split_layers(names, n_layers, is_over)

    def account(self, plan: MemoryPlan, options: LoadOptions) -> MemoryPlan:
        return plan

    def plan(self, path: Path, options: LoadOptions) -> tuple[MemoryTerm, ...]:
        split, n_ctx = options.layer_split or (), options.n_ctx or 0
        n_host = 29 - n_split(split)
        found = [
            MemoryTerm("weights", (1_600 if llamacpp_options(options).mmap else n_host * 50 + 100) * MB),
            MemoryTerm("KV cache", n_ctx * min(n_host, 28) * 10_000),
            MemoryTerm("logits", options.max_rows * MB),
        ]
        for index, (name, n) in enumerate(split):
            has_output = index == len(split) - 1
            found.append(MemoryTerm("weights", (n * 50 + 30 * has_output) * MB, device=name))
            found.append(MemoryTerm("KV cache", n_ctx * (n - has_output) * 10_000, device=name))
        return tuple(found)

    def load(self, path: Path, options: LoadOptions) -> Any:
        raise NotImplementedError

    def report(self) -> Any:
        raise NotImplementedError


BOTH, _ = drafter_factories("suffix+common", with_model=False)
WISHES = LoadPlan(Path(), Layered(), options=LoadOptions(max_rows=16), drafters=BOTH)


@pytest.fixture(scope="module")
def model() -> LoadPlan:
    """A model of 28 layers, whose bytes are those of the simulated runtime."""
    path = real_model("qwen2.5-coder-1.5b.gguf")
    return LoadPlan(path, Layered(), header=read_gguf(path))


def planned(model: LoadPlan, cap: Cap, *devices: Device, wishes: LoadPlan = WISHES) -> LoadPlan:
    return plan_within(replace(wishes, path=model.path, runtime=Layered(*devices), header=model.header), cap)


@pytest.mark.parametrize(
    ("gpu_mb", "split"),
    [
        (5_000, (("CUDA0", 29),)),  # 29 * 50 + 30 + 28 * 40.96 + 400 of the driver = 3,026.88 MB
        (3_027, (("CUDA0", 29),)),
        (3_026, (("CUDA0", 28),)),  # 90.96 MB less
        (2_935, (("CUDA0", 27),)),
        (480, (("CUDA0", 1),)),  # the output alone: 50 + 30 + 400
        (479, ()),
        (1, ()),
    ],
)
def test_as_many_layers_as_fit_are_on_the_device(model: LoadPlan, gpu_mb: int, split: Split) -> None:
    """With their part of the KV cache and the driver counted; one MB less and a layer stays on the host."""
    found = planned(model, Cap(gpu_bytes=gpu_mb * MB), CUDA0)
    assert found.options.layer_split == split
    assert found.memory.fits
    n = n_split(split)
    expected = n * 50 * MB + 30 * MB + (n - 1) * 4096 * 10_000 + 400 * MB if n else 0
    assert found.memory.device_bytes("CUDA0") == expected <= gpu_mb * MB
    assert ("layers" in found.given_up) == (n < 29)
    if n < 29:
        where = f"{n} on CUDA0" if n else "none on a GPU"
        assert found.given_up["layers"] == f"of 29 layers {where}"


def test_the_ladder_goes_over_both_caps(model: LoadPlan) -> None:
    """Under both caps layers leave the device, then the context is cut, which brings layers back to the device."""
    cap = Cap(2_000 * MB, gpu_bytes=2_000 * MB)
    ample = planned(model, replace(cap, n_bytes=3_000 * MB), CUDA0)
    assert ample.options.layer_split == (("CUDA0", 17),)  # 400 + 30 + 17 * 50 + 16 * 40.96 = 1,935.36
    assert ample.options.n_ctx == 4096
    found = planned(model, replace(cap, n_bytes=700 * MB), CUDA0)
    assert found.memory.fits
    assert found.options.n_ctx == 2048
    assert found.options.layer_split == (("CUDA0", 22),)  # 400 + 30 + 22 * 50 + 21 * 20.48 = 1,960.08
    assert llamacpp_options(found.options).mmap is False
    settings = all_plans(replace(WISHES, path=model.path, runtime=Layered(CUDA0)), replace(cap, n_bytes=100 * MB))
    assert [list(entry.given_up)[-1:] for entry in settings[1:4]] == [["mapping"], ["store"], ["store"]]
    n_layers = [n_split(entry.options.layer_split or ()) for entry in settings]
    first = next(index for index, entry in enumerate(settings) if "layers" in entry.given_up)
    assert set(n_layers[:first]) == {29}
    assert n_layers[first:] == sorted(n_layers[first:])


def test_layers_that_were_asked_for_by_number_are_not_given_up(model: LoadPlan) -> None:
    """They are refused, with what the device needs and has; fewer of them, or no number, fit."""
    cap = Cap(gpu_bytes=1_000 * MB)
    for n, fits in ((20, False), (6, True)):
        wishes = replace(WISHES, options=replace(WISHES.options, n_gpu_layers=n))
        found = planned(model, cap, CUDA0, wishes=wishes)
        assert (found.options.layer_split, found.memory.fits) == ((("CUDA0", n),), fits)
    wishes = replace(WISHES, options=replace(WISHES.options, n_gpu_layers=20, n_ctx=4096))
    with pytest.raises(MemoryCapError) as caught:
        planned(model, cap, CUDA0, wishes=wishes).memory.require()
    message = str(caught.value)
    assert "2208.2 MB on CUDA0" in message  # 400 + 30 + 1,000 + 19 * 40.96
    assert "allowed on CUDA0: 1000.0 MB" in message
    assert "over by 1208.2 MB on CUDA0" in message
    assert "put fewer layers on CUDA0 (leave n_gpu_layers out to have as many as fit)" in message


def test_no_layers_on_devices_where_none_are_wanted(model: LoadPlan) -> None:
    """With n_gpu_layers=0 no device is asked for, and the plan has the host's column only."""
    wishes = replace(WISHES, options=replace(WISHES.options, n_gpu_layers=0))
    found = planned(model, Cap(3_000 * MB), CUDA0, wishes=wishes)
    assert (found.memory.devices, found.options.layer_split) == ((), None)
    assert "CUDA0" not in found.memory.table()


def test_unified_memory_is_one_column(model: LoadPlan) -> None:
    """What a Jetson's GPU holds counts as the host's; the cap of the GPU holds for its part."""
    found = planned(model, Cap(4_000 * MB, gpu_bytes=2_000 * MB), JETSON)
    own, gpu = found.memory.total_bytes, found.memory.device_bytes("CUDA0")
    assert gpu == 400 * MB + 30 * MB + 17 * 50 * MB + 16 * 4096 * 10_000
    assert own == sum(term.n_bytes for term in found.memory.terms)
    assert found.memory.fits
    header, *_ = found.memory.table().splitlines()
    assert "host" not in header
    assert "CUDA0: " in found.memory.table() or "driver" in found.memory.table()
    tight = planned(model, Cap(2_400 * MB), JETSON)
    assert tight.memory.fits
    assert tight.memory.total_bytes <= 2_400 * MB
    assert llamacpp_options(tight.options).mmap is False  # mapped and copied weights do not both fit


def test_the_watch_leaves_out_what_the_system_does_not_count(model: LoadPlan) -> None:
    """A GPU's buffers in unified memory are no part of the process's resident memory, so its cap is less."""
    cap = Cap(6_000 * MB, 60 * MB, whole_process=True)
    found = planned(model, cap, JETSON)
    assert found.memory.process_cap_bytes == 6_000 * MB - found.memory.device_bytes("CUDA0")
    assert planned(model, cap, CUDA0).memory.process_cap_bytes == 6_000 * MB


def test_the_last_layers_are_on_the_nearest_device(model: LoadPlan) -> None:
    """Devices of other machines come first in the order, and get what the others can't take, up to the cap of each."""
    found = planned(model, Cap(gpu_bytes=1_000 * MB), FAR, NEAR)
    assert found.options.layer_split == (("FAR", 10), ("NEAR", 11))
    assert found.memory.device_bytes("NEAR") == 30 * MB + 11 * 50 * MB + 10 * 4096 * 10_000 <= 1_000 * MB
    assert found.memory.device_bytes("FAR") == 10 * 50 * MB + 10 * 4096 * 10_000 <= 1_000 * MB
    assert found.memory.fits
    small = replace(FAR, free_bytes=500 * MB)
    found = planned(model, Cap(gpu_bytes=1_000 * MB), small, NEAR)
    assert found.options.layer_split == (("FAR", 4), ("NEAR", 11))  # 4 * 90.96 of 0.9 * 500 MB
    assert found.given_up["layers"] == "of 29 layers 4 on FAR and 11 on NEAR"


def test_a_draft_model_counts_on_the_device(model: LoadPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its runtime has the target's last device; it goes before a layer does, and comes back for none.

    All layers take 3,026.88 MB, and the draft model of 30 layers 31 * 50 + 30 + 30 * 1024 * 10 kB = 1,887.2 MB.
    """
    small = real_model("smollm2-135m.gguf")
    draft = LoadPlan(small, there := Layered(CUDA0), header=read_gguf(small))
    monkeypatch.setattr("edgedec.loading.second_model.choose_runtime", lambda path, name, options: draft)
    drafters, _ = drafter_factories("suffix+model", with_model=True)
    wishes = replace(WISHES, drafters=drafters, draft_model=small)
    for gpu_mb, on_device, with_draft in ((4_915, 4_914.08, True), (4_914, 3_026.88, False), (2_000, 1_935.36, False)):
        found = planned(model, Cap(gpu_bytes=gpu_mb * MB), CUDA0, wishes=wishes)
        assert found.memory.device_bytes("CUDA0") == round(on_device * MB), gpu_mb
        assert (found.draft_model is not None) == with_draft
        assert ("draft model" in found.given_up) == (not with_draft)
    there.found = ()  # such as where the target's device is another machine's
    found = planned(model, Cap(gpu_bytes=3_027 * MB), CUDA0, wishes=wishes)
    assert found.memory.device_bytes("CUDA0") == round(3_026.88 * MB)
    assert {term.device for term in found.memory.terms if term.name.startswith("draft model: ")} == {HOST}


@pytest.mark.parametrize("n_layers", [0, 1, 7, 40])
def test_a_split_is_the_most_that_fits(n_layers: int) -> None:
    """Compared with all splits of up to 40 layers on two devices, where each layer counts and one device is dearer."""
    limits, cost = {"a": 17, "b": 9}, {"a": 2, "b": 1}

    def is_over(split: Split, name: str) -> bool:
        extra = 3 if len(split) == 2 else 0  # what two devices hold more than one
        return dict(split).get(name, 0) * cost[name] + extra > limits[name]

    found = split_layers(["a", "b"], n_layers, is_over)
    assert all(not is_over(found, name) for name, _ in found)
    assert n_split(found) == min(n_layers, 7 + 6 if n_layers > 9 else n_layers)
    assert n_split(whole_split(["a", "b"], n_layers, is_over)) == n_layers


def test_caps_are_what_is_free_or_allowed() -> None:
    """Nine tenths of what is free, or less where the user allows less; what other models hold counts."""
    small = replace(FAR, free_bytes=4_000 * MB)
    caps = device_caps([FAR, small, NEAR], 5_000 * MB, 1_000 * MB)
    found = [(cap.cap_bytes, cap.cap_name) for cap in caps]
    assert found == [(4_000 * MB, "allowed"), (3_600 * MB, "free"), (4_000 * MB, "allowed")]
    assert device_caps([NEAR], 9_000 * MB)[0].cap_name == "free"
    assert device_caps([NEAR], None)[0].cap_bytes == 6_300 * MB


def test_what_llama_cpp_splits_by_itself() -> None:
    """By what is free, as llama.cpp's upper_bound over shares does it: layer i where i / n is below the share."""
    devices = [replace(CUDA0, name=name, free_bytes=free) for name, free in (("a", 3), ("b", 5))]
    assert default_split(devices, -1, 29) == (("a", 11), ("b", 18))
    assert default_split(devices, 4, 29) == (("a", 2), ("b", 2))
    assert default_split(devices, None, 8) == (("a", 3), ("b", 5))
    assert default_split(devices[:1], 99, 29) == (("a", 29),)
    assert default_split(devices, 0, 29) == ()


def _bytes_of(terms: Any, name: str) -> dict[str, int]:
    return {term.device: term.n_bytes for term in terms if term.name.startswith(name)}


SMALL, MIDDLE, LARGE = "smollm2-135m.gguf", "qwen2.5-coder-0.5b.gguf", "qwen2.5-coder-1.5b.gguf"


@pytest.mark.parametrize(
    ("name", "split", "weights"),
    [
        (SMALL, (("a", 31),), {HOST: 30_081_024, "a": 96_576_768}),  # the embedding is the output matrix, too
        (SMALL, (("a", 10), ("b", 5)), {"a": 22_164_480, "b": 38_949_120}),
        (MIDDLE, (("a", 25),), {HOST: 144_643_072, "a": 391_859_712}),
        (LARGE, (("a", 10), ("b", 5)), {"a": 274_362_368, "b": 304_110_080}),
    ],
)
def test_weights_by_device(name: str, split: Split, weights: dict[str, int]) -> None:
    """What llama.cpp's own "model buffer size" says of devices of RPC servers, to the 0.01 MiB that it prints."""
    found = _bytes_of(weight_terms(read_gguf(real_model(name)), split, (), mmap=False), "weights")
    assert found.items() >= {**weights, HOST: found[HOST]}.items()


@pytest.mark.parametrize(
    ("mmap", "split", "copied"),
    [  # the output matrix has 144,643,072 bytes; the largest tensor of a layer has 3,575,040
        (True, (("RPC0", 12),), {HOST: 144_643_072 - 2 * MB, "RPC0": 33_090_560 - MB}),
        (False, (("RPC0", 12),), {HOST: 60_036_608 - 2 * MB, "RPC0": 33_090_560 - MB}),
        (False, (("RPC0", 3),), {HOST: 0, "RPC0": 125_212_160 - MB}),
        (True, (("RPC0", 10), ("RPC1", 15)), {HOST: 144_643_072 - 2 * MB, "RPC0": 2_575_040, "RPC1": 3_575_040}),
        (True, (("CUDA0", 12),), {HOST: 0}),
        (False, (("CUDA0", 12),), {HOST: 4 * MIB}),
    ],
)
def test_weights_for_servers_come_in_messages(mmap: bool, split: Split, copied: dict[str, int]) -> None:
    """The host copies each tensor once more, and the server has it twice, as far as that is not taken later anyway."""
    later = (MemoryTerm("KV cache", 2 * MB), MemoryTerm("KV cache", MB, device="RPC0"))
    found = weight_terms(read_gguf(real_model(MIDDLE)), split, later, mmap=mmap)
    assert {term.device: term.n_bytes for term in found if term.name == "weights (being copied)"} == copied


@pytest.mark.parametrize(
    ("run", "split", "n_layer", "seen"),
    [  # MiB, as llama.cpp printed them for devices of RPC servers on this machine (CPU there, 0.3.36)
        (HostRun(0, int(17.79 * MIB), 4096, 576), (("a", 31),), 30, {HOST: 6.36, "a": 16.64}),
        (HostRun(0, int(17.79 * MIB), 4096, 576), (("a", 10), ("b", 5)), 30, {HOST: 17.79, "a": 15.5, "b": 15.5}),
        (HostRun(0, int(17.79 * MIB), 4096, 576), (("a", 10), ("b", 21)), 30, {HOST: 22.01, "a": 33.43, "b": 38.0}),
        (HostRun(0, int(65.01 * MIB), 512, 1536), (("a", 29),), 28, {HOST: 6.51, "a": 62.01}),
        (HostRun(0, int(65.01 * MIB), 512, 1536), (("a", 10), ("b", 19)), 28, {HOST: 17.05, "a": 75.54, "b": 87.54}),
        (HostRun(0, int(81.77 * MIB), 16384, 1536), (("a", 29),), 28, {HOST: 22.36, "a": 78.72}),
        (
            HostRun(0, int(81.77 * MIB), 16384, 1536),
            (("a", 10), ("b", 19)),
            28,
            {HOST: 80.28, "a": 139.69, "b": 151.88},
        ),
    ],
)
def test_compute_buffers_are_never_below_llama_cpps(
    run: HostRun, split: Split, n_layer: int, seen: dict[str, float]
) -> None:
    """Above by at most 4 MiB on one device and while the host has layers, and by 10 with copies for several devices."""
    found = compute_bytes(run, split, n_layer)
    assert found.keys() == seen.keys()
    slack = 10 if len(split) > 1 and n_split(split) > n_layer else 4
    for name, n_mib in seen.items():
        assert n_mib - 0.01 <= found[name] / MIB <= n_mib + slack, name


def test_the_kv_cache_lies_where_its_layers_are() -> None:
    """In equal parts, without a part for the output matrix; the parts add up to the whole."""
    run = HostRun(30_000_000, 1, 4096, 576)
    for split, expected in (
        ((), {HOST: 30_000_000}),
        ((("a", 31),), {"a": 30_000_000}),
        ((("a", 1),), {HOST: 30_000_000}),
        ((("a", 10), ("b", 5)), {HOST: 16_000_000, "a": 10_000_000, "b": 4_000_000}),
    ):
        assert _bytes_of(kv_terms(run, split, 30, ""), "KV") == expected


def test_the_driver_is_measured_by_the_devices_own_account(tmp_path: Path) -> None:
    """What a load took beyond the model's terms is the driver's, for the next plan; unified memory tells nothing."""
    terms = (MemoryTerm("weights", 100 * MB, device="CUDA0"), MemoryTerm("driver", 400 * MB, device="CUDA0"))
    plan = MemoryPlan(terms, devices=(DeviceCap(CUDA0, 5_000 * MB),))
    after = replace(CUDA0, free_bytes=CUDA0.free_bytes - 350 * MB)
    found = with_account(plan, [after])
    assert found.devices[0].held_bytes == 350 * MB
    assert with_measured_drivers([CUDA0], "llamacpp", tmp_path) == (CUDA0,)
    remember_drivers(found, "llamacpp", tmp_path)
    (known,) = with_measured_drivers([CUDA0], "llamacpp", tmp_path)
    assert (known.driver_bytes, known.measured) == (250 * MB, True)
    assert with_measured_drivers([CUDA0], "other", tmp_path) == (CUDA0,)
    shared = replace(plan, devices=(DeviceCap(JETSON, 5_000 * MB),))
    assert with_account(shared, [replace(JETSON, free_bytes=1)]) == shared
