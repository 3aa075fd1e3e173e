"""The file of tuned tiles: what the plan takes from it, and that nothing in it can break a call."""

import json
import warnings
from dataclasses import asdict, replace

import pytest

from rowmax import Device, Problem, plan
from rowmax.plan import by_table, forget, tuned

H200 = Device.named("H200")
TEXT = "b1 h16 q16384 k16384 d128 bf16 causal"
PROBLEM = Problem.parse(TEXT)


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    """The file that plans are read from; not there at first."""
    path = tmp_path / "sub" / "tuned.json"
    monkeypatch.setenv(tuned.VARIABLE, str(path))
    forget()
    yield path
    monkeypatch.undo()
    forget()


def entry(algorithm="q_outer", tiles=("128x64 w8 s3 tma",), **changes) -> tuned.Entry:
    known = tuned.Entry(
        algorithm, tiles, 648.2, "q_outer[64x64 w4 s3 tma]", 630.0, "2026-11-30", tuned.triton_version(), tuned.kernels_digest()
    )
    return replace(known, **changes)


def keep(path, found: tuned.Entry, text=TEXT, direction="forward", device=H200) -> None:
    tuned.save(path, Problem.parse(text), device, direction, found)
    forget()


# ---- taken ---------------------------------------------------------------------------------------------------------


def test_without_a_file_the_tables_decide():
    assert plan(PROBLEM, H200) == by_table(PROBLEM, H200)


def test_a_tuned_tile_is_taken_with_what_was_measured(file):
    keep(file, entry())
    chosen = plan(PROBLEM, H200)
    assert str(chosen) == "q_outer[128x64 w8 s3 tma]"
    assert chosen.reason == "tuned on NVIDIA H200 2026-11-30: 648 TFLOP/s, the table's q_outer[64x64 w4 s3 tma] 630"
    assert dict(chosen.refusals)["hopper"] == "q_outer was tuned for this problem"
    assert "tuned" not in dict(chosen.refusals)


def test_the_tables_own_tile_may_be_the_best(file):
    keep(file, entry(tiles=("64x64 w4 s3 tma",)))
    assert plan(PROBLEM, H200).reason.endswith("648 TFLOP/s, the table's tile, which nothing tried there exceeds")


def test_a_table_that_was_wrong_is_said(file):
    keep(file, entry(table_tflops=0.0))
    assert plan(PROBLEM, H200).reason.endswith("the table's q_outer[64x64 w4 s3 tma] did not run")


def test_an_algorithm_that_was_measured_need_not_be_asked_for(file):
    keep(file, entry("hopper", ("128x128 s2 q1 pingpong dynamic g8",)))
    assert str(plan(PROBLEM, H200)) == "hopper[128x128 s2 q1 pingpong dynamic g8]"
    unaligned = plan(PROBLEM, H200, aligned=False)
    assert unaligned.algorithm == "q_outer"
    assert "multiples of 16 bytes" in dict(unaligned.refusals)["tuned"]


@pytest.mark.parametrize("tiles", [("64x64 w4 s2", "64x64 w4 s1 tma"), ("64x64 w4 s2", "64x64 w4 s1", "32x64 w4 s1")])
def test_a_backward(file, tiles):
    keep(file, entry(tiles=tiles), direction="backward")
    assert tuple(map(str, plan(PROBLEM, H200, direction="backward").tiles)) == tiles
    assert plan(PROBLEM, H200) == by_table(PROBLEM, H200)


def test_a_tuned_tile_without_alignment_loses_its_descriptors(file):
    keep(file, entry())
    chosen = plan(PROBLEM, H200, aligned=False)
    assert str(chosen) == "q_outer[128x64 w8 s3]"
    assert "not 16-byte aligned" in chosen.reason


@pytest.mark.parametrize(
    ("text", "device"),
    [
        (TEXT + " deterministic", "H200"),
        (TEXT.replace("causal", ""), "H200"),
        (TEXT.replace("k16384", "k16383"), "H200"),
        (TEXT, "H100"),
    ],
)
def test_other_problems_and_devices_are_as_before(file, text, device):
    keep(file, entry())
    problem, other = Problem.parse(text), Device.named(device)
    assert plan(problem, other) == by_table(problem, other)
    assert plan(PROBLEM, H200) != by_table(PROBLEM, H200)


@pytest.mark.parametrize("prefer", ["q_outer", "hopper", "q_outer[64x32 w4 s2]"])
def test_who_asks_for_a_plan_gets_it(file, prefer):
    keep(file, entry())
    assert plan(PROBLEM, H200, prefer=prefer) == by_table(PROBLEM, H200, prefer=prefer)


def test_spellings_in_any_order_are_one_problem(file):
    keep(file, entry(), "causal bf16 d128 h16 q16384")
    assert "tuned on" in plan(PROBLEM, H200).reason


# ---- left out ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"triton": "1.0.0"}, "measured with triton 1.0.0"),
        ({"kernels": "0" * 16}, "measured with other kernels"),
        ({"algorithm": "fast"}, "no algorithm 'fast'"),
        ({"algorithm": "aten", "tiles": ("256x8192",)}, "runs on the CPU"),
        ({"algorithm": "tiled", "tiles": ("64x64 w4 s2",)}, "runs on the CPU"),
        ({"tiles": ("axb",)}, "'axb' is no tile; examples"),
        ({"tiles": ("64x64 w4 s3\n",), "algorithm": "q outer"}, "is no plan"),
        ({"tiles": ()}, "'' is no tile; examples"),
        ({"tiles": ("64x64 w4 s3", "64x64 w4 s3")}, "takes one tile, not 2"),
        ({"tiles": ("100x64 w4 s3",)}, "powers of two"),
        ({"tiles": ("256x8192",)}, "powers of two from 16 to 256"),
        ({"tiles": ("64x64 w4 s3 banana",)}, "is no tile; examples"),
        ({"tiles": ("64x64",)}, "warps from 1 to 16"),
        ({"tiles": ("64x64 w3 s2",)}, "warps from 1 to 16"),
        ({"tiles": ("64x64 w4 s0",)}, "stages are 1 to 8"),
        ({"tiles": ("128x128 w8 s5",)}, "bytes of shared memory"),
        ({"tiles": ("128x128 w4 s2",)}, "registers a thread"),
        ({"algorithm": "hopper"}, "no tile of this kernel"),
        ({"algorithm": "hopper", "tiles": ("128x128 s4 q1 static",)}, "bytes of shared memory"),
        ({"algorithm": "hopper", "tiles": ("192x128 s2 q1 static",)}, "a consumer has 160"),
        ({"algorithm": "hopper", "tiles": ("128x64 s1 q1 static",)}, "stages are 2 and more"),
    ],
)
def test_an_entry_that_does_not_hold_is_left_out_with_the_reason(file, changes, reason):
    keep(file, entry(**changes))
    chosen = plan(PROBLEM, H200)
    expected = by_table(PROBLEM, H200)
    assert (chosen.algorithm, chosen.tiles, chosen.reason) == (expected.algorithm, expected.tiles, expected.reason)
    assert reason in dict(chosen.refusals)["tuned"]


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ([], "it is no object"),
        ({}, "its 'algorithm' is None and no text"),
        ({"tiles": "64x64 w4 s3"}, "its 'tiles' is '64x64 w4 s3' and no list"),
        ({"tiles": [3]}, "its 'tiles' are not all text"),
        ({"tflops": 10**400}, "its 'tflops' is no speed of any machine"),
        ({"tflops": "648"}, "its 'tflops' is '648' and no number"),
    ],
)
def test_an_entry_that_cannot_be_read_is_left_out_with_the_reason(file, found, reason):
    keep(file, entry())
    content = json.loads(file.read_text())
    whole = content["devices"]["NVIDIA H200"][TEXT]
    whole["forward"] = {**whole["forward"], **found} if found else found
    file.write_text(json.dumps(content))
    forget()
    chosen = plan(PROBLEM, H200)
    assert chosen.tiles == by_table(PROBLEM, H200).tiles
    assert reason in dict(chosen.refusals)["tuned"]


BROKEN = {
    "not JSON": ("{", "it is not JSON"),
    "foreign": ('{"a": 1}', "it has no 'rowmax_tuned'"),
    "a list": ("[1]", "it has no 'rowmax_tuned'"),
    "another format": ('{"rowmax_tuned": 99}', "it is in format 99; this version reads 1"),
    "no devices": ('{"rowmax_tuned": 1}', "its 'devices' are not"),
    "other devices": ('{"rowmax_tuned": 1, "devices": {"NVIDIA H200": {"b1": 3}}}', "its 'devices' are not"),
    "not text": (b"\xff\xfe\x00", "decode"),
}


@pytest.mark.parametrize(("content", "says"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_one_warning_and_no_more(file, content, says):
    file.parent.mkdir()
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.warns(RuntimeWarning) as caught:
        assert plan(PROBLEM, H200) == by_table(PROBLEM, H200)
    assert len(caught) == 1
    assert str(file) in str(caught[0].message)
    assert says in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(PROBLEM.with_(len_q=77), H200)


def test_a_directory_in_the_files_place_is_a_warning(file):
    file.mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="are left out"):
        assert plan(PROBLEM, H200) == by_table(PROBLEM, H200)


def test_on_a_cpu_the_file_is_not_even_read(file):
    file.parent.mkdir()
    file.write_text("{")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(PROBLEM, Device.named("cpu"))


# ---- the file ------------------------------------------------------------------------------------------------------


def test_entries_are_added_and_replaced(file):
    keep(file, entry())
    keep(file, entry(tiles=("64x64 w4 s2", "64x64 w4 s1")), direction="backward")
    keep(file, entry(), "b2 h4 q100 d64 fp16")
    keep(file, entry(), device=Device.named("H100"))
    keep(file, entry(tflops=700.0))
    devices = tuned.read(file)
    assert {name: list(problems) for name, problems in devices.items()} == {
        "NVIDIA H200": [TEXT, "b2 h4 q100 k100 d64 fp16"],
        "NVIDIA H100": [TEXT],
    }
    assert devices["NVIDIA H200"][TEXT]["forward"]["tflops"] == 700.0
    assert devices["NVIDIA H200"][TEXT]["backward"]["tiles"] == ["64x64 w4 s2", "64x64 w4 s1"]
    assert [path.name for path in file.parent.iterdir()] == ["tuned.json"]
    assert tuned.Entry.read(json.loads(json.dumps(asdict(entry())))) == entry()


def test_a_failed_write_leaves_the_file_as_it_was(file, monkeypatch):
    keep(file, entry())
    before = file.read_text()
    with pytest.raises(TypeError):
        tuned.save(file, PROBLEM, H200, "forward", entry(tflops=1j))
    monkeypatch.setattr(type(file), "replace", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        tuned.save(file, PROBLEM, H200, "forward", entry(tflops=700.0))
    assert file.read_text() == before
    assert [path.name for path in file.parent.iterdir()] == ["tuned.json"]


def test_what_is_no_file_of_ours_is_not_overwritten(file):
    file.parent.mkdir()
    file.write_text('{"a": 1}')
    with pytest.raises(ValueError, match="no file of tuned tiles"):
        tuned.save(file, PROBLEM, H200, "forward", entry())
    assert file.read_text() == '{"a": 1}'


def test_a_file_is_read_once_until_it_is_to_be_forgotten(file):
    plan(PROBLEM, H200)
    tuned.save(file, PROBLEM, H200, "forward", entry())
    assert plan(PROBLEM, H200) == by_table(PROBLEM, H200)
    assert plan(PROBLEM.with_(deterministic=True), H200).tiles == by_table(PROBLEM, H200).tiles
    forget()
    assert "tuned on" in plan(PROBLEM, H200).reason


def test_where_the_file_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv(tuned.VARIABLE, "~/mine.json")
    assert tuned.location() == tmp_path / "mine.json"
    monkeypatch.setenv(tuned.VARIABLE, "")
    assert tuned.location() is None
    monkeypatch.delenv(tuned.VARIABLE)
    assert tuned.location() == tmp_path / "xdg" / "rowmax" / "tuned.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert tuned.location() == tmp_path / ".cache" / "rowmax" / "tuned.json"


def test_the_digest_is_of_every_kernel(monkeypatch, tmp_path):
    monkeypatch.setattr(tuned, "KERNELS", tmp_path)
    (tmp_path / "deep").mkdir()

    def digest() -> str:
        tuned.kernels_digest.cache_clear()
        return tuned.kernels_digest()

    seen = [digest()]
    for name, text in (("a.py", "x = 1"), ("deep/b.py", "x = 1"), ("a.py", "x = 2"), ("deep/b.py", "")):
        (tmp_path / name).write_text(text)
        seen.append(digest())
    assert len(set(seen)) == 5
    tuned.kernels_digest.cache_clear()


def test_without_triton_a_plan_may_still_be_asked_for(file, monkeypatch):
    keep(file, entry())
    monkeypatch.setattr(tuned, "triton_version", lambda: "")
    forget()
    assert "tuned on" in plan(PROBLEM, H200).reason
