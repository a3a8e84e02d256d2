"""`raybench compare` over Parquet of runs whose difference is known, as users type it."""

import json
import math
import re
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from itertools import product

import pytest
from builders import (
    START,
    column,
    make_device,
    make_failed,
    make_point,
    make_record,
    make_row,
    unscaled_point,
)
from compared import compare_as_json, make_points, sweep, sweep_both, sweep_sides, write
from scipy.stats import nct
from scipy.stats import t as student

from raybench.analysis.compare import (
    PointChange,
    changes,
    compare,
    facts,
    history,
    point_changes,
)
from raybench.analysis.rows import point_rows
from raybench.report.words.compare import other_verdicts, verdict_count
from raybench.results import reader

SIDES = ("side=base", "side=new")
REGRESSION, UNCLEAR = 1, 5


def flat(text):
    return " ".join(text.split())


# Half of all: any three of the four in each of their combinations.
@pytest.mark.parametrize(
    ("base_rounds", "new_rounds", "base_runs", "new_runs"),
    [counts for counts in product((1, 3), repeat=4) if counts.count(1) % 2 == 0],
)
def test_all_rounds_and_runs_count(tmp_path, command, base_rounds, new_rounds, base_runs, new_runs):
    # The last round of each run is 10 % off, so that a mean of all rounds shows what was used.
    names: dict[str, list[str]] = {"base": [], "new": []}
    point = make_point(world_size=1)
    for side, rounds, runs, level in (
        ("base", base_rounds, base_runs, 8.0),
        ("new", new_rounds, new_runs, 8.8),
    ):
        for number in range(runs):
            times = [level] * (rounds - 1) + [level * 1.1]
            records = [
                make_record(point, step_ms=ms, attempt=n, round=None if rounds == 1 else n)
                for n, ms in enumerate(times, 1)
            ]
            names[side].append(f"{side}{number}")
            write(tmp_path, names[side][-1], records)
    found = compare_as_json(command, *(",".join(names[side]) for side in ("base", "new")))
    [point] = found["points"]
    assert (point["base_runs"], point["new_runs"]) == (base_runs, new_runs)
    assert point["base"] == pytest.approx(64000 / 8.0 / 1.1 ** (1 / base_rounds), rel=1e-3)
    assert point["new"] == pytest.approx(64000 / 8.8 / 1.1 ** (1 / new_rounds), rel=1e-3)
    has_verdict = min(base_runs, new_runs) > 1
    assert point["verdict"] == ("slower" if has_verdict else "unclear")


def test_rounds_of_one_run_are_no_verdict(tmp_path, command):
    sweep(tmp_path, "base", rounds=5)
    sweep(tmp_path, "new", 1.3, rounds=5, day=1)
    code, out, _ = command("compare", "base", "new")
    told = "Certainty: unknown, because rounds of one run do not show how runs differ."
    assert (code, told in flat(out)) == (0, True)
    assert len(re.findall(r"-(22|23)\.\d% .* undecided", out)) == 3
    assert "Then name all runs: raybench compare RUN,RUN,RUN RUN,RUN,RUN" in flat(out)
    assert max(map(len, out.splitlines())) <= 80


def test_gate_fails_on_regression_and_passes_equal_runs(tmp_path, command):
    sweep_sides(tmp_path / "slow", 1.05)
    sweep_sides(tmp_path / "same", 1.0)
    # One run a side never passes.
    sweep_sides(tmp_path / "one", 1.3, runs=1)
    sweep_sides(tmp_path / "one same", 1.0, runs=1)
    expected = {"slow": REGRESSION, "same": 0, "one": UNCLEAR, "one same": UNCLEAR}
    for (folder, code), kind in product(expected.items(), ("regression", "unclear")):
        gate = ("compare", *SIDES, "--fail-on", kind)
        assert command(*gate, results=tmp_path / folder)[0] == code, (folder, kind)


@pytest.mark.parametrize(("runs", "count"), [(1, 1), (1, 30), (3, 1), (3, 30)])
def test_the_first_screen_fits_24_lines(tmp_path, command, runs, count):
    for side, version in (("base", "2.27.3"), ("new", "2.28.9")):
        device = make_device(versions={"nccl": version, "torch": version})
        variables = {f"NCCL_VARIABLE_WITH_A_NAME_{n}": side for n in range(9)}
        for number in range(runs):
            sweep(
                tmp_path,
                f"{side}{number}",
                1.1 if side == "new" else 1.0,
                start_sd=0.03,
                points=make_points(count),
                day=number,
                tags={"side": side},
                devices=(device,),
                environment=variables,
            )
    out = command("compare", *SIDES).out
    assert len(out.splitlines()) <= 24
    assert max(map(len, out.splitlines())) <= 80
    told = "Caveat: the environments differ in torch 2.27.3 -> 2.28.9, nccl 2.27.3 -> 2.28.9"
    assert told in flat(out)
    assert ("Next: raybench compare side=base side=new --results" in out) or (
        "Next: repeat this command with --full" in out
    )
    assert len(command("compare", *SIDES, "--full").out.splitlines()) > len(out.splitlines())


def test_json_has_question_and_answer(tmp_path, command):
    sweep_sides(tmp_path, 1.05)
    found = compare_as_json(command, *SIDES)
    assert found["question"] == "Is NEW slower than BASE?"
    assert found["answer"][0].startswith("All 3 points are slower. The worst is batch ")
    assert found["answer"][-1].startswith("Certainty: in 95 % of cases, such runs detect ")


@pytest.mark.parametrize(
    ("counts", "first", "others"),
    [
        ({"slower": 1, "same": 2}, "1 of 3 points is slower.", "2 are the same."),
        ({"unclear": 3}, "All 3 points are undecided.", ""),
        (
            {"faster": 1, "same": 2, "unclear": 1},
            "0 of 4 points are slower.",
            "1 is faster, 2 are the same and 1 is undecided.",
        ),
    ],
)
def test_an_answer_counts_each_verdict_once(counts, first, others):
    points = sum(counts.values())
    assert verdict_count(Counter(counts), points) == first
    assert other_verdicts(Counter(counts), points) == others


def test_gate_is_unclear_when_changes_cannot_be_excluded(tmp_path, command):
    sweep_both(tmp_path, 1.0, 1.12, 0.9)
    gate = ("compare", *SIDES, "--fail-on", "regression")
    code, out, _ = command(*gate)
    assert (code, "These runs do not exclude that a point is up to" in out) == (UNCLEAR, True)
    assert command(*gate, "--blind", "95%")[0] == 0
    refused = command("compare", *SIDES, "--fail-on", "unclear", "--blind", "10%").refusal
    assert refused == "--blind: goes with --fail-on regression only\n"
    assert "BASE: 3 runs with side=base, the newest is" in out
    assert "BASE base0, base1, base2" in flat(command("compare", *SIDES, "--full").out)


@pytest.mark.long
def test_shift_of_whole_runs_is_no_regression(tmp_path, command):
    # Three runs on either side that differ by 2 %, each moving 8 points and 2 rounds alike.
    found = 0
    for seed in "abc":
        sweep_sides(tmp_path / seed, 1.0, seed=seed, points=make_points(8), rounds=2, run_sd=0.02)
        words = ("compare", *SIDES, "--fail-on", "regression")
        found += command(*words, results=tmp_path / seed)[0] == REGRESSION
    assert found == 0


def test_an_unclear_point_has_its_reason_as_data(tmp_path, command):
    sweep_both(tmp_path, 1.0, 1.03, 0.98)
    one_run = compare_as_json(command, "base0", "new0,new1")["points"][0]["why"]
    assert (one_run["kind"], one_run["side"], one_run["runs"]) == ("few_runs", "base", 1)
    point = compare_as_json(command, *SIDES)["points"][0]
    why = point["why"]
    assert (why["kind"], point["verdict"]) == ("wide", "unclear")
    assert (why["low"], why["high"]) == (point["ratio_low"] - 1, point["ratio_high"] - 1)
    assert point["interval_low"] < point["ratio_low"] < point["ratio_high"] < point["interval_high"]


def test_change_explained_by_chance_is_reported_as_chance(tmp_path, command):
    sweep_both(tmp_path, 1.0, 1.06, 0.97, new=1.03)
    points = compare_as_json(command, *SIDES)["points"]
    assert [one["why"]["kind"] for one in points] == ["chance"] * 3


# A bare operation has no throughput: its mean step is compared.
@pytest.mark.parametrize("points", [None, [unscaled_point("memory", operation="triad")]])
def test_stall_that_only_affects_mean_is_a_regression(tmp_path, command, points):
    sweep_sides(tmp_path, 1.0, points=points, new={"stall": 2.0})
    found = compare_as_json(command, *SIDES)
    for point in found["points"]:
        assert point["verdict"] == "slower"
        assert point["unit"] == ("samples/s" if points is None else "steps/s")
        assert point["ratio"] == pytest.approx(1 / (1 + 1 / 16), abs=0.01)
        assert point["ratio_low"] < point["ratio"] < point["ratio_high"]
    assert command("compare", *SIDES, "--fail-on", "regression")[0] == REGRESSION


def test_all_that_is_shown_is_of_one_rate(tmp_path, command):
    # The median step is 12.7 % longer, but no step takes ten times as long any more.
    new = {"stall": 1.0}
    sweep_sides(tmp_path, 1.127, runs=1, stall=10.0, new=new)
    found = compare_as_json(command, "base0", "new0")
    for point in found["points"]:
        assert point["ratio"] == pytest.approx((1 + 9 / 16) / 1.127, abs=0.02)
        assert point["new"] / point["base"] == pytest.approx(point["ratio"])
    out = command("compare", "base0", "new0").out
    assert len(re.findall(r"\+(38|39)\.\d% +undecided", out)) == 3
    assert "ms" not in [word for line in out.splitlines() for word in line.split()]
    assert re.search(r"The median change of samples/s is \+(38|39)\.\d %\.", flat(out))


def test_a_sure_change_within_the_threshold_is_same(tmp_path, command):
    sweep_sides(tmp_path, 1.01, start_sd=0.0005)
    assert compare_as_json(command, *SIDES)["verdicts"] == {"same": 3}
    assert compare_as_json(command, *SIDES, "--threshold", "0.5%")["verdicts"] == {"slower": 3}


@pytest.mark.parametrize(
    ("factor", "start_sd", "why"),
    [(1.0, 0.02, "but its interval is not"), (1.1, 0.1, "the change may be chance")],
)
def test_unclear_points_say_what_is_missing(tmp_path, command, factor, start_sd, why):
    sweep_sides(tmp_path, factor, start_sd=start_sd, points=make_points(1))
    [point] = compare_as_json(command, *SIDES)["points"]
    assert (point["verdict"], point["why"]["text"][-len(why) :]) == ("unclear", why)


# Eight points that each run moves alike have no more degrees of freedom than one.
@pytest.mark.parametrize(
    ("count", "scatter"), [(1, {"start_sd": 0.01}), (8, {"start_sd": 0.0, "run_sd": 0.01})]
)
def test_the_printed_slowdown_is_found_in_95_percent(tmp_path, command, count, scatter):
    sweep_sides(tmp_path, 1.0, points=make_points(count), **scatter)
    for point in compare_as_json(command, *SIDES)["points"]:
        half = math.log(point["ratio_high"] / point["ratio_low"]) / 2
        # Half of the 90 % interval is 2.13 standard errors, too small by 9 % in the median.
        error = half / student.ppf(0.95, 4) / 0.916
        needed = student.ppf(1 - 0.0175 / count, 4)
        found = nct.sf(needed, 4, -math.log(1 - point["least_seen"]) / error)
        assert found == pytest.approx(0.95, abs=0.001)
    seen = point["least_seen"]
    told = f"such runs detect {100 * seen:.1f} % fewer samples/s at one point."
    assert (told in flat(command("compare", *SIDES).out)) is (count == 1)


def test_swapping_sides_inverts_the_verdicts_and_ratios(tmp_path, command):
    sweep_sides(tmp_path, 1.05)
    there = compare_as_json(command, *SIDES)
    back = compare_as_json(command, *reversed(SIDES))
    assert (there["verdicts"], back["verdicts"]) == ({"slower": 3}, {"faster": 3})
    for one, other in zip(there["points"], back["points"], strict=True):
        assert one["ratio"] * other["ratio"] == pytest.approx(1)
        assert one["ratio_low"] * other["ratio_high"] == pytest.approx(1)


def test_noise_is_undecided_with_the_command_that_decides(tmp_path, command):
    sweep_both(tmp_path, 1.0, 1.06, 0.97, 1.03)
    assert compare_as_json(command, *SIDES)["verdicts"] == {"unclear": 3}
    out = flat(command("compare", *SIDES)[1])
    assert "All 3 points are undecided." in out
    assert "To decide: measure BASE, NEW, BASE, NEW and so on, until each side has 6 runs." in out
    assert "Use --tag side=base and --tag side=new, then repeat this command." in out
    told = "he slowdown of this point alone that such runs find in 95 % of cases"
    assert told in flat(command("compare", *SIDES, "--format", "md").out)
    assert told in flat(command("compare", *SIDES, "--full").out)
    assert told not in out


def test_the_worst_change_stands_first(tmp_path, command):
    points = make_points(3)
    for number in range(6):
        side = ("base", "new")[number % 2]
        records = [
            make_record(point, step_ms=8.0 * (factor if side == "new" else 1.0))
            for point, factor in zip(points, (1.0, 1.05, 1.4), strict=True)
        ]
        write(tmp_path, f"{side}{number}", records, tags={"side": side})
    out = command("compare", *SIDES)[1]
    told = "2 of 3 points are slower. The worst is batch 4: 28.6 % fewer samples/s. 1 is the same."
    assert told in flat(out)
    lines = [line for line in out.splitlines() if line.endswith(("slower", "same"))]
    assert [line.split()[-1] for line in lines] == ["slower", "slower", "same"]
    assert "-28.6%" in lines[0]


def test_new_failure_is_regression_with_one_run_each(tmp_path, command):
    two = make_point(world_size=2)
    write(tmp_path, "base", [make_record(make_point(world_size=1)), make_record(two)])
    write(tmp_path, "broken", [make_record(make_point(world_size=1)), make_failed(two)])
    code, out, _ = command("compare", "base", "broken", "--fail-on", "regression")
    assert (code, "1 point fails more often in NEW." in out) == (REGRESSION, True)
    assert "BASE: ok; NEW: out of memory" in out


def test_equally_frequent_failures_are_no_regression(tmp_path, command):
    for number in range(3):
        for side in ("base", "new"):
            points = make_points(3)
            made = [make_failed(points[0]) if number == 0 else make_record(points[0])]
            made += map(make_record, points[1:])
            write(tmp_path, f"{side}{number}", made, tags={"side": side})
    gate = ("compare", *SIDES, "--fail-on", "regression")
    assert command(*gate)[0] == 0
    write(tmp_path, "new3", [make_failed(make_points(1)[0])], tags={"side": "new"})
    assert command(*gate)[0] == REGRESSION


def test_a_round_that_failed_is_a_failure(tmp_path, command):
    [point] = make_points(1)
    sweep(tmp_path, "base", points=[point], rounds=3)
    failed = make_failed(point, round=2, attempt=2)
    write(tmp_path, "new", [make_record(point, round=1), failed])
    write(tmp_path, "bad", [make_failed(point)])
    code, out, _ = command("compare", "base,bad", "new", "--fail-on", "regression")
    assert (code, "1 point fails more often in NEW." in out) == (REGRESSION, True)
    assert "No verdict: one run on each side." in out


def test_gate_is_unclear_if_new_misses_a_point(tmp_path, command):
    sweep_sides(tmp_path, 1.0, points=make_points(3), new={"points": make_points(2)})
    gate = ("compare", *SIDES, "--fail-on")
    code, out, _ = command(*gate, "regression")
    assert (code, "1 point of BASE has no verdict: " in out) == (UNCLEAR, True)
    assert command(*gate, "unclear")[0] == 0


def test_gate_passes_when_speed_gain_is_uncertain(tmp_path, command):
    sweep_both(tmp_path, 1.0, 1.06, 0.95, new=0.5)
    assert compare_as_json(command, *SIDES)["verdicts"] == {"faster": 3}
    assert command("compare", *SIDES, "--fail-on", "regression")[0] == 0


def test_unmatched_points_are_counted_with_their_difference(tmp_path, command):
    many = [make_point(world_size=1, batch_size=2**n, params={"hidden": 64}) for n in range(36)]
    few = [make_point(world_size=1, batch_size=2**n, params={"hidden": 128}) for n in range(8)]
    sweep(tmp_path, "base", points=many)
    sweep(tmp_path, "new", points=few, day=1)
    out = command("compare", "base", "new")[1]
    told = (
        "36 points are in BASE only and 8 points are in NEW only. "
        "44 points have no partner, because their hidden differs."
    )
    assert told in flat(out)
    assert "None" not in out
    assert len(out.splitlines()) < 14


def test_sides_without_samples_are_compared_by_steps():
    def side(name, rate):
        times = [{"step_ms_p50": ms, "step_ms_mean": ms} for ms in (10.0, 10.01, 10.02)]
        return [[make_row(run_id=f"{name}{n}", throughput=rate, **t)] for n, t in enumerate(times)]

    [found] = compare(side("a", None), side("b", 6400.0))
    assert (found.verdict, found.unit) == ("same", "steps/s")
    assert (found.base, found.ratio) == (pytest.approx(99.9, abs=0.1), pytest.approx(1.0))


def test_other_devices_are_said_loudly_and_no_gate(tmp_path, command):
    sweep(tmp_path, "base")
    device = make_device(0, name="NVIDIA B200")
    others = [make_record(point, step_ms=12.0, devices=(device,)) for point in make_points(3)]
    write(tmp_path, "other", others, [device])
    code, out, _ = command("compare", "base", "other")
    assert code == 0
    told = "Not comparable: the runs used different devices: NVIDIA H200, NVIDIA B200."
    assert told in flat(out)
    found = compare_as_json(command, "base", "other")
    [obstacle] = found["obstacles"]
    assert obstacle["kind"] == "other_device"
    assert obstacle["values"] == ["NVIDIA H200", "NVIDIA B200"]
    assert found["points"][0]["why"] == obstacle
    code, _, err = command("compare", "base", "other", "--fail-on", "regression")
    assert (code, err.count("\n"), "not comparable: the runs used" in err) == (2, 1, True)


def test_tagged_runs_with_another_commit_are_left_out(tmp_path, command):
    sweep(tmp_path, "old", tags={"branch": "main"}, git_commit="a" * 40)
    sweep(tmp_path, "base", day=1, tags={"branch": "main"}, git_commit="b" * 40)
    sweep(tmp_path, "new", day=2, git_commit="c" * 40)
    out = command("compare", "branch=main", "new")[1]
    assert "old is left out because it differs in git commit." in flat(out)
    [left_out] = compare_as_json(command, "branch=main", "new")["left_out"]
    assert left_out["differs_in"] == [{"kind": "run", "name": "git_commit"}]
    named = compare_as_json(command, "old,base", "new")
    assert (named["left_out"], [run["run_id"] for run in named["base"]]) == ([], ["old", "base"])


def test_another_nccl_is_told_wherever_its_file_is(tmp_path, command):
    for number in range(3):
        for side, version in (("base", "2.27.3"), ("new", "2.28.9")):
            path = f"/build-{number}/{side}/libnccl.so.2"
            device = make_device(versions={"nccl": version}, nccl_path=path)
            sweep(tmp_path, f"{side}{number}", day=number, tags={"side": side}, devices=(device,))
    found = compare_as_json(command, *SIDES)
    changes = {one["name"]: (one["base"], one["new"]) for one in found["changes"]}
    assert changes["nccl"] == ("2.27.3", "2.28.9")
    assert changes["nccl_path"] == ("/build-2/base/libnccl.so.2", "/build-2/new/libnccl.so.2")
    assert "2.28.9" in command("compare", *SIDES).out
    # Builds in other folders are the same side.
    assert (found["left_out"], len(found["base"]), len(found["new"])) == ([], 3, 3)


def test_environment_changes_appear_in_markdown_and_json(tmp_path, command):
    sweep(tmp_path, "base")
    records = [make_record(point) for point in make_points(3)]
    write(tmp_path, "new", records, [make_device(0, driver_version="590.2"), make_device(1)])
    assert "driver" in command("compare", "base", "new", "--format", "md")[1]
    content = compare_as_json(command, "base", "new")
    assert content["comparable"] is True
    driver = {"kind": "device", "name": "driver_version", "base": "580.1", "new": "580.1, 590.2"}
    assert content["changes"][0] == driver


def test_page_leads_with_answer_and_one_chart(tmp_path, command):
    sweep_sides(tmp_path, 1.05)
    page = tmp_path / "page.html"
    code, out, err = command("compare", *SIDES, "--format", "html", "-o", str(page))
    assert (code, out, err) == (0, "", f"{page}: open it in a browser\n")
    text = page.read_text()
    assert '<p class="lead">All 3 points are slower. The worst is batch ' in text
    assert "Environment differences" in text
    assert text.count("<svg") == 1


def test_the_page_colours_each_verdict_differently(tmp_path, command):
    factors = (0.8, 1.0, 1.0, 1.06, 1.4)
    points = make_points(len(factors))
    for number in range(6):
        side, sign = ("base", "new")[number % 2], (-1) ** (number // 2)
        records = []
        for place, (point, factor) in enumerate(zip(points, factors, strict=True)):
            noise = 1 + sign * {2: 0.03, 3: 0.08}.get(place, 0.0)
            step_ms = 8.0 * noise * (factor if side == "new" else 1.0)
            records.append(make_record(point, step_ms=step_ms))
        write(tmp_path, f"{side}{number}", records, tags={"side": side})
    page = tmp_path / "page.html"
    command("compare", *SIDES, "-o", str(page))
    text = page.read_text()
    for name in ("slower", "faster", "same", "undecided, over 1.5 %", "undecided, up to 1.5 %"):
        assert f">{name}</text>" in text
    for color in ("--bad", "--s3", "--axis", "--s5", "--s6"):
        assert re.search(rf'aria-label="[^"]*"[^>]*fill="var\({color}\)"', text), color


def run_on(device=None, **of_run):
    """A run, and what its device has other than usual."""
    return device or {}, of_run


RING = run_on({"environment": {"NCCL_DEBUG": "WARN", "NCCL_ALGO": "Ring"}})
CODE = {"net.py": "1" * 64, "loss.py": "3" * 64}
OLD_CODE = run_on(raybench_sha256="a" * 64, workload_files=CODE)
DRIVER = ("device", "driver_version", "580.1", "590.2")
COMMIT = ("run", "git_commit", "a" * 12, "b" * 12 + "+x")
MEMORY = ("device", "memory_bytes", "150000000000", "40353607")
NEW_CODE = run_on(raybench_sha256="a" * 64, workload_files=CODE | {"net.py": "2" * 64})


@pytest.mark.parametrize(
    ("base", "new", "told"),
    [
        (run_on(), run_on(started_at=START + timedelta(hours=1)), []),
        (run_on(), run_on({"driver_version": "590.2"}), [DRIVER]),
        (run_on(), RING, [("variable", "NCCL_ALGO", "none", "Ring")]),
        (run_on(), run_on(git_commit="b" * 40 + "+x"), [COMMIT]),
        (run_on(), run_on({"environment": {"A": "none"}}), [("variable", "A", "none", "'none'")]),
        (OLD_CODE, NEW_CODE, [("code", "net.py", "1" * 12, "2" * 12)]),
        (run_on(), OLD_CODE, []),  # one run tells of no code
        (run_on(), run_on({"memory_bytes": 7**9}), [MEMORY]),
        (run_on(), run_on({"uuid": "GPU-9"}), [("device", "uuid", "GPU-0", "GPU-9")]),
        (run_on({"kind": "cpu"}), run_on({"kind": "cpu", "uuid": "b"}), []),  # names a process
    ],
)
def test_environments_are_told_apart_by_what_differs(tmp_path, base, new, told):
    for name, (of_device, of_run) in (("base", base), ("new", new)):
        both = (of_device, of_device | {"memory_bytes": None})
        write(tmp_path, name, [], [make_device(0, **one) for one in both], **of_run)
    runs = reader.read_runs(tmp_path)
    known = [facts(run, reader.load_table(tmp_path, "devices", run.run_id)) for run in runs]
    assert [(one.kind, one.name, one.base, one.new) for one in changes(*known)] == told


def broken_down(step_ms, compute_ms):
    return make_row(step_ms_p50=step_ms, device_type="cuda", compute_ms=compute_ms)


def test_changed_part_is_omitted_if_breakdown_contradicts_step():
    base = broken_down(8.0, 7.0)
    [part] = point_changes(base, broken_down(10.0, 9.0))
    assert part == PointChange(column="compute_ms", base=7.0, new=9.0, unit="ms")
    assert point_changes(base, broken_down(10.0, 18.0)) == ()
    assert point_changes(broken_down(None, 7.0), broken_down(10.0, 10.0)) == ()
    assert point_changes(broken_down(8.0, 18.0), broken_down(10.0, 9.0)) == ()


def test_parts_that_changed_with_the_step_are_named():
    parts = ("compute_ms", "comm_exposed_ms", "straggler_ms", "optimizer_ms", "host_gap_ms")
    usual = {"step_ms_p50": 8.0, "throttled": False, "sm_clock_mhz_p50": 1980.0}
    known = dict.fromkeys(parts, 1.0) | usual
    base = make_row(device_type="cuda", **known)
    slower = {"step_ms_p50": 9.0, "comm_exposed_ms": 1.9, "compute_ms": 0.5}
    found = point_changes(base, replace(base, **slower, throttled=True, sm_clock_mhz_p50=1410.0))
    moved = ["comm_exposed_ms", "throttled", "sm_clock_mhz_p50"]
    assert [one.column for one in found] == moved
    late = point_changes(base, replace(base, step_ms_p50=9.0, straggler_ms=2.0))
    assert [one.column for one in late] == ["straggler_ms"]
    both = {"step_ms_p50": 9.0, "comm_exposed_ms": 1.4, "straggler_ms": 1.6}
    found = point_changes(replace(base, comm_exposed_ms=1.1), replace(base, **both))
    assert [one.column for one in found] == ["straggler_ms", "comm_exposed_ms"]


def test_a_history_keeps_other_devices_apart(tmp_path):
    for day in range(12):
        device = make_device(0, name="NVIDIA H200" if day < 6 else "NVIDIA B200")
        step_ms = (8.0 if day < 6 else 4.0) * (1 + 0.001 * (day % 2))
        started_at = START + timedelta(days=day)
        one = make_record(
            make_point(world_size=1), step_ms=step_ms, devices=(device,), started_at=started_at
        )
        write(tmp_path, f"run{day}", [one], [device], started_at=started_at)
    found = history(point_rows(reader.load_table(tmp_path, "points")))
    assert column(found, "machine") == [0] * 6 + [1] * 6
    assert set(column(found, "level_change")) == {None}


@pytest.fixture
def nights(tmp_path):
    """Ten runs of three points; from the sixth on slower by 8 %, with another driver."""
    for day in range(10):
        device = make_device(0, driver_version="590.2" if day >= 5 else "580.1")
        factor = 1.08 if day >= 5 else 1.0
        sweep(tmp_path, f"night{day}", factor, day=day, devices=[device])


@pytest.mark.usefixtures("nights")
def test_history_marks_the_step_and_what_changed(tmp_path, command):
    code, out, err = command("history", "--chart", tmp_path / "a.svg")
    assert (code, err) == (0, "")
    assert "3 points in 10 runs: 3 lasting changes of a step time." in out
    assert "driver 580.1 -> 590.2" in out
    assert (tmp_path / "a.svg").read_text().startswith("<svg")


@pytest.mark.usefixtures("nights")
def test_history_of_a_point_skips_damaged_runs(tmp_path, command):
    write(tmp_path, "env", [make_record(make_point(env={"A": "1.10"}))], [make_device(0)])
    assert "1 point in 1 run" in command("history", "--filter", "A == '1.10'").out
    out = command("history", "--filter", "batch_size == 2")[1]
    assert "1 point in 10 runs: 1 lasting change of a step time." in out
    point_id = make_point(world_size=1, batch_size=2).point_id
    (tmp_path / "runs" / "night9" / "run.parquet").write_bytes(b"no Parquet")
    _, out, err = command("history", "--point", point_id[:6], "--json")
    assert [one["run_id"] for one in json.loads(out)["points"]] == [f"night{n}" for n in range(9)]
    assert "run night9 is left out" in err
