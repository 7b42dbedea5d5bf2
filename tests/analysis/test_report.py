from __future__ import annotations

import html.parser
import itertools
import json
import os
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.known import known
from tests.run_factory import (
    EPOCHS,
    SWEEP_TOML,
    candidate,
    configurations,
    make_run,
    measurement,
    oom,
    opening_text,
    pages_alone,
    plan,
    sweep_of,
    write_plan,
    write_training,
)
from tula_hpc.analysis.costs import interruptions as checkpoints
from tula_hpc.analysis.figures.all import DECIDING, FIGURES
from tula_hpc.analysis.figures.style import COLOURS
from tula_hpc.analysis.node_scaling import no_scaling
from tula_hpc.analysis.report import tables
from tula_hpc.analysis.report.__main__ import main
from tula_hpc.analysis.report.first_page import first_page
from tula_hpc.analysis.report.page import MOST_WARNINGS, write_report
from tula_hpc.analysis.report.tables import (
    SUMMARY_COLUMNS,
    candidate_table,
    failure_table,
    model_tables,
    summary_cells,
    summary_rows,
    summary_table,
)
from tula_hpc.analysis.report.text import assumptions, doubts, how_measured
from tula_hpc.analysis.run_contents import RunContents, candidate_of, ends, median_epoch_s, read_run
from tula_hpc.cli.pipeline import carry_out, print_summary, report_stage
from tula_hpc.config import ClusterSpec, PricingSpec
from tula_hpc.errors import RunDirectoryError, StorageError
from tula_hpc.files import MEASUREMENTS_GONE
from tula_hpc.formatting import format_duration, in_comparison
from tula_hpc.records import Configuration, EpochMetrics, JobAccount, JobNote, RunDirectory, TrainResult, append_record

VOID = {"meta", "link", "br", "img", "hr", "input"}
HOSTILE = "<script>alert('ü')</script></svg>&\"'"


class Page(html.parser.HTMLParser):
    """A parser of pages that notices unbalanced tags and collects what the tests compare."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.requests: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        self.ids += [values["id"] or ""] if "id" in values else []
        if tag in ("link", "script", "img", "iframe", "image"):
            self.requests.append(values.get("href") or values.get("src") or "inline")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        """Return the text as a reader sees it, with plain spaces."""
        return re.sub(r"\s+", " ", "".join(self.text))


def warnings(run: RunContents) -> list[str]:
    return [doubt.text for doubt in doubts(run)]


class Written:
    """A finished run with its report."""

    def __init__(self, root: Path) -> None:
        self.run = make_run(root)
        self.paths = write_report(self.run)
        self.html = self.paths[0].read_text(encoding="utf-8")
        self.page = Page(self.html)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A finished run without a report; read only."""
    return make_run(tmp_path_factory.mktemp("ended") / "run")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Written:
    with pages_alone():
        return Written(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A report with few figures and their PNG and PDF files: drawing each twice takes most of a report's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tula_hpc.analysis.figures.all.FIGURES", {name: FIGURES[name] for name in DECIDING})
        return Written(tmp_path_factory.mktemp("printed") / "run")


@pytest.fixture
def cost_figure(monkeypatch: pytest.MonkeyPatch, no_pages: None, no_figure: None) -> None:
    """Draw the cost figure only, for tests that need one figure with a plan."""
    monkeypatch.setattr("tula_hpc.analysis.figures.all.FIGURES", {"cost": FIGURES["cost"]})


@pytest.fixture
def no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no figures, for tests of the files or the page."""
    monkeypatch.setattr("tula_hpc.analysis.figures.all.FIGURES", {})
    monkeypatch.setattr("tula_hpc.analysis.figures.all.node_scaling_of", lambda _: no_scaling("it is not looked at"))


@pytest.fixture
def no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave PDF and PNG files empty, where they do not matter."""
    monkeypatch.setattr("tula_hpc.analysis.figures.drawing.render_pdf", lambda *_: b"%PDF")
    monkeypatch.setattr("tula_hpc.analysis.figures.drawing.Drawing.png", lambda _: b"")


def test_a_folder_of_runs_is_no_run_whatever_they_are_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "runs" / "train")
    assert main([str(run.root.parent)]) == 2
    output = capsys.readouterr().err
    assert f"is not a run directory: it has no sweep.toml; did you mean {run.root}?" in output
    assert {path.name for path in run.root.parent.iterdir()} == {"train"}


@pytest.mark.processes
def test_every_file_is_there_and_nothing_else(finished: Written) -> None:
    figures = {f"{name}.{suffix}" for name in FIGURES for suffix in ("svg", "png", "csv")}
    tables = {f"{kind}_scaling.{suffix}" for kind in ("strong", "weak") for suffix in ("txt", "tex")}
    names = {path.name for path in finished.run.report.iterdir()}
    assert names == figures | tables | {"report.html", "report.pdf"}
    assert {path.name for path in finished.paths} == names
    assert finished.paths[0] == finished.run.report / "report.html"


@pytest.mark.processes
def test_the_pdf_has_a_page_for_the_answer_and_one_for_each_figure(printed: Written) -> None:
    content = (printed.run.report / "report.pdf").read_bytes()
    assert content.startswith(b"%PDF")
    assert len(re.findall(rb"/Type /Page\b", content)) == 1 + len(DECIDING)
    heights = [float(height) for height in re.findall(rb"/MediaBox \[ 0 0 [\d.]+ ([\d.]+) \]", content)]
    assert len(heights) == 1 + len(DECIDING)
    # A4 is 842 points high
    assert max(heights) < 842.5


@pytest.mark.processes
def test_what_decides_stands_before_a_line_and_what_is_for_studying_behind_it(finished: Written) -> None:
    deciding, line, studying = finished.html.partition('<h2 class="line"')
    assert line
    shown = [re.findall(r'<figure id="(\w+)">', part) for part in (deciding, studying)]
    assert shown == [list(DECIDING), [name for name in FIGURES if name not in DECIDING]]
    assert studying.partition(">")[2].startswith("Details, which the decision does not need</h2>")
    for heading in ("All candidates", "How it was measured", "Models", "Will it scale?", "Events", "<details>"):
        assert heading not in deciding
        assert heading in studying
    for words in ("Trained on ", "What would change it", "same batch, "):
        assert words in deciding
    # on paper the line begins a page
    assert ".line { break-before: page;" in deciding


@pytest.mark.usefixtures("no_figure")
def test_many_warnings_do_not_push_what_decides_off_its_two_pages(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", stage="plan")
    doubts = [f"doubt {number} of many, " + "which is a long sentence, " * 6 for number in range(30)]
    write_plan(run, run.read_plan().model_copy(update={"warnings": doubts}))
    deciding, _, studying = write_report(run)[0].read_text().partition('<h2 class="line"')
    assert deciding.count("Doubt ") == MOST_WARNINGS
    assert "Good to know</h2>" in deciding
    assert f">{30 - MOST_WARNINGS} more</a>" in deciding
    assert studying.count("Doubt ") == 30 - MOST_WARNINGS
    (height,) = re.findall(rb"/MediaBox \[ 0 0 [\d.]+ ([\d.]+) \]", (run.report / "report.pdf").read_bytes())
    assert float(height) < 842.5


def inline_svgs(page: str) -> list[str]:
    """Return the figures that are part of the page."""
    return re.findall(r"<svg\b.*?</svg>", page, re.DOTALL)


@pytest.mark.processes
def test_every_svg_is_well_formed(finished: Written) -> None:
    files = [finished.run.report / f"{name}.svg" for name in FIGURES]
    assert {ElementTree.parse(file).getroot().tag for file in files} == {"{http://www.w3.org/2000/svg}svg"}  # noqa: S314 - ours


@pytest.mark.processes
def test_every_png_is_150_dpi(printed: Written) -> None:
    heads = [(printed.run.report / f"{name}.png").read_bytes()[:20] for name in DECIDING]
    # 5.4 inches
    assert {(head[:4], head[16:]) for head in heads} == {(b"\x89PNG", (810).to_bytes(4, "big"))}


@pytest.mark.processes
def test_inline_svgs_share_no_ids_and_ask_for_nothing(finished: Written) -> None:
    seen: set[str] = set()
    for name, text in zip(FIGURES, inline_svgs(finished.html), strict=True):
        ids = {element.attrib["id"] for element in ElementTree.fromstring(text).iter() if "id" in element.attrib}  # noqa: S314 - ours
        assert ids
        assert ids.isdisjoint(seen)
        seen |= ids
        used = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
        assert used <= ids
        assert "title" not in {identifier.removeprefix(f"{name}-") for identifier in ids}


@pytest.mark.processes
def test_inline_svgs_follow_the_pages_colours(finished: Written) -> None:
    for text in inline_svgs(finished.html):
        assert "var(--ink)" in text
        assert not any(colour.light in text for colour in COLOURS)


@pytest.mark.processes
def test_the_page_is_well_formed_and_self_contained(finished: Written) -> None:
    page = finished.page
    assert page.requests == ["data:,"]
    assert len(page.ids) == len(set(page.ids))
    assert page.tags.count("svg") == len(FIGURES)
    # a figure is named by its title, so that this begins it
    named = [after for tag, after in itertools.pairwise(page.tags) if tag == "figure"]
    assert named == ["figcaption"] * len(FIGURES)
    assert page.tags.count("figcaption") == len(FIGURES)
    assert "script" not in page.tags
    # no level of headings is left out
    levels = [int(tag[1]) for tag in page.tags if tag in ("h1", "h2", "h3")]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


@pytest.mark.processes
def test_the_page_says_what_to_do_and_what_came_of_it(finished: Written) -> None:
    words = finished.page.words
    assert "Trained on 4 nodes with global batch 1,024 (256 samples for each of 4 workers)." in words
    assert re.search(r"The training's steps took .*; with training.method = .ags. the model reached ", words)
    assert "64.5 % test accuracy" in words
    for heading in ("Figures", "How it was measured", "Models", "All candidates (21)", "sweep.toml", "Events (4)"):
        assert heading in words
    assert 'dataset = "cifar100"' in words
    for column in ("epoch time, s", "global batch, samples", "efficiency, %", "cost, USD", "node hours"):
        assert column in words


@pytest.mark.usefixtures("cost_figure")
def test_a_second_report_replaces_the_first(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", stage="plan")
    first = {path.name for path in write_report(run)}
    run.plan_file.unlink()
    second = {path.name for path in write_report(run)}
    assert second < first
    assert {path.name for path in run.report.iterdir()} == second


@pytest.mark.usefixtures("no_figure", "no_pages")
def test_json_names_every_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", stage="plan")
    assert main([str(run.root), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["schema_version"], output["kind"], output["run_directory"]) == (1, "run", str(run.root))
    assert output["files"][0] == output["page"] == str(run.report / "report.html")
    assert {Path(path).name for path in output["files"]} == {path.name for path in run.report.iterdir()}


@pytest.mark.usefixtures("no_figure", "no_pages")
def test_a_reader_that_is_gone_when_the_page_is_named_gets_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", stage="plan")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main([str(run.root)]) == 0
    assert (run.report / "report.html").exists()


@pytest.mark.usefixtures("cost_figure")
def test_reports_grow_with_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", stage="profile")
    words = Page(write_report(run)[0].read_text()).words
    assert "There is no plan yet. 18 configurations have been measured, 3 ran out of memory." in words
    assert "Not in this report: cost: prices come with the plan" in words
    write_plan(run, plan([candidate(item) for item in configurations()]))
    write_training(run, epochs_done=3)
    words = Page(write_report(run)[0].read_text()).words
    assert "The training is not finished; 3 epochs are done" in words
    assert "Not in this report" not in words


@pytest.mark.usefixtures("no_pages")
def test_text_from_files_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tula_hpc.analysis.figures.all.FIGURES", {"memory": FIGURES["memory"]})
    run = make_run(tmp_path / "run", stage="profile")
    run.sweep_file.write_text(SWEEP_TOML + f"# {HOSTILE}\n")
    where = Configuration(1, 1, 32)
    append_record(
        run.profile / "x.jsonl", measurement(where, 7, hosts=(HOSTILE,), device=HOSTILE, versions={HOSTILE: "1"})
    )
    append_record(run.profile / "x.jsonl", oom(Configuration(1, 1, 8192), detail=HOSTILE))
    run.log_event("failed", "train", detail=HOSTILE, job_id="17")
    hostile = plan(
        [candidate(item) for item in configurations()],
        warnings=[f"{HOSTILE}; try --set a=1"],
        reason=HOSTILE,
        models={HOSTILE: {HOSTILE: HOSTILE}},
    )
    write_plan(run, hostile)
    text = write_report(run)[0].read_text()
    page = Page(text)
    assert "script" not in page.tags
    assert "<script" not in text
    assert page.words.count(HOSTILE) >= 9
    assert '; try <span class="option">--set</span> a=1' in text


@pytest.mark.usefixtures("no_figure", "no_pages")
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", stage="profile")
    run.report.write_text("a file where the folder should be")
    assert main([str(run.root)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_damaged_files_are_named_and_the_rest_is_used(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.plan_file.write_text("{")
    run.cluster_file.write_text("max_nodes = 'many'")
    run.train().result_file.write_text("{}")
    (run.profile / "torn.jsonl").write_text('{"status": "ok", "no')
    contents = read_run(run)
    assert len(contents.ok) == 18
    assert contents.plan is None
    began = JobNote(note="began", time=1.0, job_id="7", detail="`conda …` in setup ended with exit code 127")
    contents = contents._replace(job_notes=[began])
    assert any(text.startswith("Job 7 went on although `conda …` in setup") for text in warnings(contents))
    notes = " ".join(contents.notes)
    assert all(name in notes for name in ("plan.json", "cluster.toml", "result.json", "torn or unknown: 1 line."))
    assert set(contents.notes) <= set(warnings(contents))


@pytest.mark.usefixtures("no_figure")
def test_logs_alone_without_any_input_file_make_a_report(tmp_path: Path) -> None:
    run = make_run(tmp_path / "copied", stage="profile")
    for file in (run.sweep_file, run.cluster_file, run.events_file):
        file.unlink()
    page = Page(write_report(run)[0].read_text())
    assert "copied" in page.words
    assert "sweep.toml is missing." in page.words


@pytest.mark.usefixtures("no_figure", "no_pages")
def test_a_failed_write_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", stage="profile")
    html_file = write_report(run)[0]
    before = html_file.read_text()

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(StorageError, match="No space"):
        write_report(run)
    assert html_file.read_text() == before
    assert not [path for path in run.report.iterdir() if path.name.startswith(".")]


def test_summary_rows_are_the_chosen_one_and_its_neighbours(ended: RunDirectory) -> None:
    made, measured = ended.read_plan(), ended.measurements().records
    rows = summary_rows(made, measured, None)
    chosen = made.chosen.configuration
    assert [row.candidate.configuration for row in rows] == [
        chosen,
        Configuration(4, 1, chosen.local_batch // 2),
        Configuration(4, 1, chosen.local_batch * 2),
        Configuration(1, 1, chosen.global_batch),
        Configuration(2, 1, chosen.global_batch // 2),
    ]
    for row in rows:
        known = row.measured_epoch_s is not None
        item = row.candidate
        assert known == (item.configuration in {item.configuration for item in measured if item.status == "ok"})
        assert item.train_time_s == pytest.approx(EPOCHS * item.epoch_time_s)
        assert row.result is None
    # the error is that of the fit, because the model was fitted to what was measured
    assert "against prediction" not in summary_table(rows).columns
    assert not rows[3].candidate.feasible
    # a batch with more samples than there are
    none = rows[3]._replace(candidate=rows[3].candidate.model_copy(update={"train_time_s": 0.0}))
    assert summary_cells(none)[4:7] == ("–", "–", "–")
    assert "–" not in summary_cells(rows[3])[4:7]
    assert all(len(summary_cells(row)) >= len(SUMMARY_COLUMNS) for row in rows)


def test_tables_tell_the_whole_time_by_which_the_plan_decides() -> None:
    where = [candidate(item).model_copy(update={"wall_time_s": 3600.0}) for item in configurations()]
    made = plan(where)
    for table in (summary_table(summary_rows(made, [], None)), candidate_table(made, [])):
        assert {row[table.columns.index("whole time")] for row in table.rows} == {"1 h"}
        assert "all steps" in table.columns


def of_two_partitions(root: Path) -> RunDirectory:
    """Return a run whose plan chose partition a; b was measured, too, and is ten times as slow and as expensive."""
    run = make_run(root, stage="plan")
    text = run.cluster_file.read_text()
    for name, price in (("a", 1.0), ("b", 10.0)):
        text += f'[[partitions]]\npartition = "{name}"\npricing = {{ usd_per_node_hour = {price} }}\n'
    run.cluster_file.write_text(text)
    made = plan([candidate(where) for where in configurations()])
    here, there = ([item.model_copy(update={"partition": name}) for item in made.candidates] for name in "ab")
    of_steps = {"train_time_s": made.chosen.interval_90["train_time_s"]}
    times = {"wall_time_s": 3 * made.chosen.train_time_s, "interval_90": of_steps}
    chosen = made.chosen.model_copy(update={"partition": "a", **times})
    for path in run.profile.glob("*.jsonl"):
        path.unlink()
    for name, pace in (("a", 1.0), ("b", 10.0)):
        where = chosen.configuration
        row = measurement(where, partition=name)
        assert row.times is not None
        slow = row.times.model_copy(update={"step_time_s": pace * row.times.step_time_s})
        append_record(run.profile / f"{name}.jsonl", row.model_copy(update={"times": slow, "elapsed_s": 360.0}))
    changes = {
        "chosen": chosen, "candidates": [*there, *here], "reason": f"{chosen.configuration} on a: it is best",
        "notes": ["prices are guesses"], "binding": ["without objective.budget, N=1 would be chosen"],
    }  # fmt: skip
    write_plan(run, made.model_copy(update=changes))
    return run


def test_of_several_partitions_the_summary_is_about_the_chosen_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = of_two_partitions(tmp_path / "run")
    made, rows = run.read_plan(), run.measurements().records
    alone = made.model_copy(update={"candidates": [item for item in made.candidates if item.partition == "a"]})
    summary = summary_rows(made, rows, None)
    assert summary == summary_rows(alone, [row for row in rows if row.partition == "a"], None)
    print_summary(made, rows, None)
    assert capsys.readouterr().out.splitlines()[0].split()[-2:] == ["on", "a"]


def test_candidates_of_several_partitions_say_which(tmp_path: Path) -> None:
    run = of_two_partitions(tmp_path / "run")
    made = run.read_plan()
    table = candidate_table(made, run.measurements().records)
    assert table.columns[0] == "partition"
    assert {len(row) for row in table.rows} == {len(table.columns)}
    measured = {row[0]: row[5] for row in table.rows if row[5] != "–"}
    assert len(set(measured.values())) == len(measured) == 2
    alone = made.model_copy(update={"candidates": [candidate(where) for where in configurations()]})
    assert "partition" not in candidate_table(alone, []).columns


def test_failures_and_assumptions_of_several_partitions_say_which(tmp_path: Path) -> None:
    contents = read_run(of_two_partitions(tmp_path / "run"))
    failures = [oom(Configuration(1, 1, 512)).model_copy(update={"partition": name}) for name in "ab"]
    assert [row[0] for row in failure_table(failures).rows] == [f"N=1 b=512 (B=512) on {name}" for name in "ab"]
    notes = ["a: its price is a guess", "starts are assumed"]
    made = known(contents.plan).model_copy(update={"notes": notes})
    assert assumptions(contents._replace(plan=made)) == ["a: its price is a guess.", "Starts are assumed."]


def test_profiling_on_several_partitions_is_priced_on_each(tmp_path: Path) -> None:
    contents = read_run(of_two_partitions(tmp_path / "run"))
    # 4 nodes, 0.1 h, 1 + 10 USD
    assert dict(how_measured(contents))["cost of profiling"].endswith("4.40 USD")


def test_nodes_differ_only_within_a_partition(tmp_path: Path) -> None:
    def differ(*devices: tuple[str, str]) -> list[str]:
        rows = [measurement(where, partition=name, device=device) for name, device in devices]
        return [text for text in warnings(contents._replace(measurements=rows)) if "differ" in text]

    where = Configuration(1, 1, 32)
    contents = read_run(of_two_partitions(tmp_path / "run"))
    assert differ(("a", "A100"), ("b", "V100")) == []
    (message,) = differ(("a", "A100"), ("b", "V100"), ("b", "H100"))
    assert message.startswith("The nodes of partition b differ: H100, V100.")
    (message,) = differ(("", "A100"), ("", "V100"))
    assert message.startswith("The nodes differ: A100, V100.")


def test_the_partitions_say_which_memory_was_measured(tmp_path: Path) -> None:
    def memory(**devices: str) -> str:
        tables = [{"partition": name, "device": device} for name, device in devices.items()]
        return dict(how_measured(contents._replace(cluster=ClusterSpec.model_validate({"partitions": tables}))))[
            "memory"
        ]

    contents = read_run(of_two_partitions(tmp_path / "run"))
    gpu, process = "GPU memory reserved by the allocator", "resident memory of the whole process"
    assert memory(a="cuda", b="cuda") == f"{gpu}, peak per worker"
    assert memory(a="cuda", b="cpu") == f"{gpu} or {process}, peak per worker"


def test_names_of_partitions_are_never_capitalized(tmp_path: Path) -> None:
    run = of_two_partitions(tmp_path / "run")
    given = ["a: a doubt", "b: another", "partition b is left out", "absent: nothing"]
    write_plan(run, run.read_plan().model_copy(update={"warnings": given}))
    messages = warnings(read_run(run))
    assert messages[:4] == ["a: a doubt.", "b: another.", "Partition b is left out.", "Absent: nothing."]


@pytest.mark.usefixtures("no_figure", "no_pages")
def test_the_report_says_what_the_plan_says(tmp_path: Path) -> None:
    run = of_two_partitions(tmp_path / "run")
    words = Page(write_report(run)[0].read_text()).words
    expected = format_duration(3 * run.read_plan().chosen.train_time_s)
    assert f"About {expected} and " in words
    assert " epochs, from start to end; " in words
    assert "Train on 4 nodes of partition a with" in words
    assert " It is best." in words
    assert "Prices are guesses." in words
    assert "Without objective.budget, N=1 would be chosen." in words


def test_steps_outside_of_their_interval_come_first_under_how_sure(ended: RunDirectory) -> None:
    contents = read_run(ended)
    (training,) = contents.trainings
    _, low, high = known(contents.plan).chosen.predicted("epoch_time_s")
    for seconds, way in ((low * 1.01, ""), (high * 0.99, ""), (low * 0.99, "shorter"), (high * 1.01, "longer")):
        epochs = [epoch.model_copy(update={"epoch_time_s": seconds}) for epoch in training.metrics.epochs]
        result = known(training.result).model_copy(update={"train_time_s": len(epochs) * seconds})
        changed = training._replace(metrics=training.metrics._replace(epochs=epochs), result=result)
        sections = dict(first_page(contents._replace(trainings=[changed])).sections)
        # without other doubts the section is left out
        text = sections.get("How sure", [""])[0]
        assert text.startswith("The steps of the training were ") == bool(way)
        assert f"% {way} than predicted, outside of the 90 % interval: the median epoch took " in text or not way
        # once is enough
        assert ("its median epoch was" in " ".join(sections["What it took"])) == (not way)


def test_the_answer_says_that_the_prediction_is_compared_with_the_median_epoch(ended: RunDirectory) -> None:
    contents = read_run(ended)
    (training,) = contents.trainings
    assert training.epoch_time_s is not None
    # within the interval
    epoch_s = training.epoch_time_s / 1.05
    assert contents.plan is not None
    chosen = contents.plan.chosen.model_copy(update={"epoch_time_s": epoch_s})
    result = known(training.result).model_copy(update={"train_time_s": 2 * EPOCHS * epoch_s})
    plan = contents.plan.model_copy(update={"chosen": chosen, "candidates": [chosen]})
    text = opening_text(contents._replace(plan=plan, trainings=[training._replace(result=result)]))
    assert f"took {format_duration(result.train_time_s)} (its median epoch was 5 % longer than predicted)" in text


def with_bill(root: Path, elapsed_s: float, within: float = 0.1) -> RunDirectory:
    """Return a run with parts in its plan and a training that took this long by accounting."""
    run = make_run(root)
    made = run.read_plan()
    steps_s = made.chosen.train_time_s
    parts = {"steps": steps_s, "evaluation": 0.0, "checkpoints": 0.0, "starts": 60.0, "repeated": 0.0}
    ends = {
        "wall_time_s": (0.9 * (steps_s + 60.0), 1.1 * (steps_s + 60.0)),
        "train_time_s": ((1 - within) * steps_s, (1 + within) * steps_s),
    }
    changes = {"wall_time_s": steps_s + 60.0, "wall_parts_s": parts, "interval_90": made.chosen.interval_90 | ends}
    chosen = made.chosen.model_copy(update=changes)
    candidates = [chosen if item == made.chosen else item for item in made.candidates]
    write_plan(run, made.model_copy(update={"chosen": chosen, "candidates": candidates}))
    run.log_event("submitted", "train", job_id="21", data={"label": "main"})
    ids = [job.job_id for job in run.history().submissions("train")]
    for job_id, seconds in zip(ids, [elapsed_s, *[0.0] * len(ids)], strict=False):
        fields = {"job_id": job_id, "stage": "train", "state": "COMPLETED", "over": True, "nodes": chosen.nodes}
        append_record(run.accounting_file, JobAccount.model_validate({**fields, "elapsed_s": seconds}))
    return run


@pytest.mark.usefixtures("no_figure", "no_pages")
def test_the_time_and_cost_of_the_training_are_stated_first_and_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = with_bill(tmp_path / "run", 9_000.0, within=0.001)
    result = TrainResult.model_validate_json(run.train().result_file.read_bytes())
    longer = result.model_copy(update={"train_time_s": 1.2 * result.train_time_s})
    run.train().result_file.write_text(longer.model_dump_json())
    run.log_event("drifted", "train", data={"ratio": 1.1, "part": "network", "label": "main"})
    run.log_event("recovered", "train", data={"label": "main"})
    text = opening_text(read_run(run))
    assert "The training took 2 h 30 min in all by Slurm's accounting, longer than the 90 % interval" in text
    assert text.index("Trained on 4 nodes") < text.index("The training took") < text.index("It cost ")
    assert "What it will take" not in [section.heading for section in first_page(read_run(run)).sections]
    assert re.search(r"The training's steps took .*; with training.method = .ags. the model reached ", text)
    sweep = sweep_of(run)
    for until in ("train", "report"):
        carry_out(sweep, until)
        lines = capsys.readouterr().out.splitlines()
        assert any(line.startswith("The training took 2 h 30 min") for line in lines[-9:])
        (off,) = (line for line in lines[-4:] if line.startswith("off the plan: The steps of the training were "))
        assert off.endswith("; its drift events point to the network")
    words = Page((run.report / "report.html").read_text()).words
    assert words.index("The training took 2 h 30 min") < words.index("Predicted and actual") < words.index("N = 4, B =")
    assert "whole training" in words
    assert " USD paid" in words


def test_damaged_accounting_leaves_the_rest_of_the_report(tmp_path: Path) -> None:
    run = with_bill(tmp_path / "run", 9_000.0)
    run.accounting_file.write_text("{")
    text = opening_text(read_run(run))
    assert text.startswith("Trained on 4 nodes"), "old results do not have starts"
    assert re.search(r"The training's steps took .*; with training.method = .ags. the model reached ", text)


def test_the_error_of_a_trained_configuration_is_that_of_its_training(ended: RunDirectory) -> None:
    """The error is not that of the profile to which the model was fitted, whether there is a profile or not."""
    made, measured = ended.read_plan(), ended.measurements().records
    (training,) = read_run(ended).trainings
    assert training.epoch_time_s is not None
    for rows in (measured, []):
        chosen, *others = summary_rows(made, rows, training)
        assert others == summary_rows(made, rows, None)[1:]
        cells = summary_cells(chosen)
        assert cells[2].endswith(f"\n{format_duration(training.epoch_time_s)} in training")
        assert cells[3] == f"{in_comparison(training.epoch_time_s / made.chosen.epoch_time_s)}\nin training"


def test_a_training_counts_only_where_it_ran(ended: RunDirectory) -> None:
    made, measured = ended.read_plan(), ended.measurements().records
    (training,) = read_run(ended).trainings
    result = known(training.result)
    rows = summary_rows(made, measured, training)
    assert [row.result for row in rows] == [result, *[None] * (len(rows) - 1)]
    assert [row.trained_epoch_s for row in rows] == [training.epoch_time_s, *[None] * (len(rows) - 1)]
    assert summary_table(rows).columns[-1] == "accuracy"
    moved = result.model_copy(update={"global_batch": result.global_batch // 2, "local_batch": result.local_batch // 2})
    rows = summary_rows(made, measured, training._replace(result=moved))
    assert [row.result is not None for row in rows] == [False, True, *[False] * 3]


def test_a_training_in_other_passes_is_not_compared_with_the_prediction(tmp_path: Path) -> None:
    """After running out of memory a script may take the same batch in more forward passes."""
    run = make_run(tmp_path / "run")
    made = run.read_plan()
    for passes in (1, 2):
        data = {"label": "main", "configuration": list(made.chosen.configuration), "accumulation": passes}
        run.log_event("submitted", "train", job_id=str(passes), data=data)
        contents = read_run(run)
        (training,) = contents.trainings
        found = candidate_of(made, training)
        assert (found == made.chosen) == (passes == 1)
        rows = summary_rows(made, [], training)
        assert rows[0].result == training.result
        assert rows[0].trained_epoch_s == (training.epoch_time_s if passes == 1 else None)


@pytest.mark.usefixtures("no_figure", "no_pages")
def test_a_training_counts_only_on_the_partition_where_it_ran(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = of_two_partitions(tmp_path / "run")
    write_training(run)
    sweep = sweep_of(run)
    # the plan chose a; old records do not name a partition
    for name in (None, "a", "b"):
        if name:
            run.log_event("submitted", "train", job_id="9", data={"label": "main", "partition": name})
        contents = read_run(run)
        (training,) = contents.trainings
        found = known(candidate_of(contents.plan, training))
        assert found.partition == (name or "a")
        assert ("It ended on 4 nodes of partition b with" in opening_text(contents)) == (name == "b")
        if name:
            carry_out(sweep, "report")
            words = f"{format_duration(training.epoch_time_s)} in training"
            page = Page((run.report / "report.html").read_text()).words
            assert (words in page, "in training" in capsys.readouterr().out) == (name == "a", name == "a")


@pytest.mark.usefixtures("no_figure", "no_pages")
@pytest.mark.parametrize(
    ("factor", "words", "until"),
    [
        (1.0, None, "report"),
        (1.0e9, "Training main: the loss ended at 378,000,000, above the ", "report"),
        (1.0e9, "Training main: the loss ended at 378,000,000, above the ", "train"),
    ],
)
def test_a_training_that_diverged_is_a_warning(
    tmp_path: Path, factor: float, words: str | None, until: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    files = run.train()
    lines = [json.loads(line) for line in files.metrics_file.read_text().splitlines()]
    lines = [line | {"train_loss": factor * line["train_loss"]} if "train_loss" in line else line for line in lines]
    files.metrics_file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    # otherwise the command would measure more
    run.log_event("submitted", "train", job_id="9", data={"label": "main"})
    carry_out(sweep_of(run), until)
    output = capsys.readouterr().out.splitlines()
    assert ["warning: the loss ended" in line for line in output[-5:]].count(True) == (words is not None)
    assert any(text.startswith(words or "Training main") for text in warnings(read_run(run))) == (words is not None)


@pytest.mark.parametrize(
    ("loss", "diverged", "is_said"), [(0.5, False, False), (None, False, True), (None, True, False)]
)
def test_a_test_loss_that_is_not_finite_is_a_warning(
    ended: RunDirectory, loss: float | None, diverged: bool, is_said: bool
) -> None:
    contents = read_run(ended)
    (training,) = contents.trainings
    assert contents.sweep is not None
    workload = contents.sweep.workload.model_copy(update={"loss": "mine:loss"})
    result = known(training.result).model_copy(update={"test_loss": loss, "diverged": diverged})
    of_own_loss = contents.sweep.model_copy(update={"workload": workload})
    messages = warnings(contents._replace(sweep=of_own_loss, trainings=[training._replace(result=result)]))
    assert any("the loss on the test set is inf or nan" in words for words in messages) == is_said


@pytest.mark.parametrize("accuracy", [0.5, None])
def test_why_a_script_has_no_score_is_a_warning(ended: RunDirectory, accuracy: float | None) -> None:
    contents = read_run(ended)
    script = {"script": Path("/gone/train.py"), "metric": "acc (?P<test_accuracy>.*)"}
    assert contents.sweep is not None
    workload = contents.sweep.workload.model_copy(update=script)
    (training,) = contents.trainings
    result = known(training.result).model_copy(update={"test_accuracy": accuracy, "test_loss": None})
    of_script = contents._replace(
        sweep=contents.sweep.model_copy(update={"workload": workload}), trainings=[training._replace(result=result)]
    )
    messages = [words for words in warnings(of_script) if "workload.metric has matched no line" in words]
    assert len(messages) == (accuracy is None)


def test_repeated_measurements_count_by_their_median() -> None:
    where = Configuration(1, 1, 32)
    repeats = [measurement(where, seed) for seed in range(3)]
    rows = summary_rows(plan([candidate(where), candidate(Configuration(1, 1, 64))]), repeats, None)
    middle = sorted(item.times.step_time_s for item in repeats if item.times)[1]
    assert rows[0].candidate.configuration == where
    assert rows[0].measured_epoch_s == pytest.approx(50_000 // 32 * middle)


def test_profiling_cost_is_that_of_the_jobs_where_they_left_notes(tmp_path: Path) -> None:
    run = of_two_partitions(tmp_path / "run")
    for name, nodes in (("a", 4), ("b", 1)):
        path = run.profile / f"{name}.jsonl"
        (row,) = (item for item in run.measurements().records if item.partition == name)
        path.unlink()
        append_record(path, row.model_copy(update={"job_id": name}))
        for note, at in (("began", 1000.0), ("ready", 1100.0), ("ended", 1720.0)):
            fields = {"note": note, "time": at, "began_at": 1000.0, "job_id": name, "allocated_nodes": nodes}
            append_record(path.with_suffix(".notes"), JobNote.model_validate(fields))
    contents = read_run(run)
    text = dict(how_measured(contents))["cost of profiling"]
    # 0.8 hours at 1 USD, 0.2 at 10 USD
    assert text == "3,600 node-seconds (1 node-hours), 2.80 USD"


def accounted(run: RunDirectory, *rows: tuple[str, str, bool, int, float]) -> None:
    """Write accounting of these profile jobs: name, partition, whether it is over, nodes and seconds."""
    for job_id, partition, over, nodes, elapsed_s in rows:
        run.log_event("submitted", "profile", job_id=job_id, data={"partition": partition})
        fields = {"job_id": job_id, "stage": "profile", "state": "COMPLETED" if over else "RUNNING", "over": over}
        append_record(run.accounting_file, JobAccount(**fields, nodes=nodes, elapsed_s=elapsed_s))


@pytest.mark.usefixtures("no_figure", "no_pages")
def test_profiling_costs_what_accounting_says_where_it_has_every_job(tmp_path: Path) -> None:
    run = of_two_partitions(tmp_path / "run")
    run.events_file.unlink()
    own = dict(how_measured(read_run(run)))["cost of profiling"]
    assert "accounting" not in own
    accounted(run, ("7", "a", True, 4, 720.0))
    run.log_event("submitted", "profile", job_id="8", data={"partition": "b"})
    assert dict(how_measured(read_run(run)))["cost of profiling"] == own, "accounting lacks a job"
    accounted(run, ("8", "b", False, 1, 600.0))
    assert dict(how_measured(read_run(run)))["cost of profiling"] == own, "one job has not ended"
    accounted(run, ("8", "b", True, 1, 120.0))
    text = dict(how_measured(read_run(run)))["cost of profiling"]
    expected = "3,600 node-seconds (1 node-hours) by Slurm's accounting (by the run's own records 2,880), 2.80 USD"
    # 0.8 hours at 1 USD, 0.2 at 10 USD, for both runs of the job that was requeued
    assert text == expected
    page = Page(write_report(run)[0].read_text()).words
    assert "Jobs by Slurm's accounting (3)" in page
    assert "RUNNING, when last asked" in page


@pytest.mark.usefixtures("no_figure", "no_pages")
def test_the_report_counts_the_jobs_that_its_table_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = of_two_partitions(tmp_path / "run")
    accounted(run, *((job_id, "b", True, 1, 60.0) for job_id in "7896"))
    monkeypatch.setattr(tables, "ends", lambda rows, most=2: ends(rows, most))
    page = Page(write_report(run)[0].read_text()).words
    assert "Jobs by Slurm's accounting (4)" in page
    assert "2 more in accounting.jsonl" in page


@pytest.mark.usefixtures("no_figure", "no_pages")
def test_a_sweep_writes_down_what_accounting_has_before_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    ended = {"state": "COMPLETED", "over": True, "nodes": 4, "elapsed_s": 90.0}
    known = {
        job.job_id: [JobAccount.model_validate({"job_id": job.job_id, "stage": job.stage, **ended})]
        for job in run.history().submissions()
    }
    monkeypatch.setattr("tula_hpc.launch.launcher.accounted_runs", lambda *_, **__: known)
    report_stage(sweep_of(run))
    assert "by Slurm's accounting" in Page((run.report / "report.html").read_text()).words


def test_notes_that_a_training_has_outdated_are_left_out(tmp_path: Path) -> None:
    run = of_two_partitions(tmp_path / "run")
    of_all = checkpoints.describe(None, PricingSpec())
    assumed = [of_all, *(f"{name}: {of_all}" for name in "ab")]
    notes = {"notes": [*assumed, "prices are guesses"], "provisional": {"save": assumed}}
    write_plan(run, run.read_plan().model_copy(update=notes))
    assert sum("checkpoint" in sentence for sentence in assumptions(read_run(run))) == 3
    run.log_event("checkpoint", "train", data={"cost_s": 0.01})
    messages = assumptions(read_run(run))
    assert not any("checkpoint" in sentence for sentence in messages)
    assert "Prices are guesses." in messages


def test_a_training_that_fell_back_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    result = json.loads(run.train().result_file.read_text()) | {"global_batch": 512, "local_batch": 128, "restarts": 3}
    run.train().result_file.write_text(json.dumps(result))
    text = opening_text(read_run(run))
    assert "It ended on 4 nodes with global batch 512, not with the chosen configuration." in text
    assert "resumed 3 times" in text


def test_epochs_with_another_batch_do_not_count_for_the_time_in_training(ended: RunDirectory) -> None:
    def lasting(seconds: float, batch: int, workers: int = 4) -> EpochMetrics:
        return one.model_copy(update={"epoch_time_s": seconds, "global_batch": batch, "workers": workers})

    one = read_run(ended).trainings[0].metrics.epochs[0]
    first, changed, last = [lasting(17.0, 1024)] * 13, lasting(18.0, 512), [lasting(20.0, 512)] * 3
    assert median_epoch_s(first) == 17.0
    assert median_epoch_s([*first, changed, *last]) == 20.0
    assert median_epoch_s([*first, changed]) is None
    assert median_epoch_s([*first, lasting(18.0, 1024, 2), lasting(30.0, 1024, 2)]) == 30.0


def test_what_another_version_wrote_of_a_training_is_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    before = read_run(run)
    result = json.loads(run.train().result_file.read_text())
    run.train().result_file.write_text(json.dumps(result | {"tuning": {"rollbacks": 2}}))
    after = read_run(run)
    assert (after.sweep, after.trainings, after.notes) == (before.sweep, before.trainings, before.notes)


def test_models_are_shown_whatever_they_are_made_of() -> None:
    models = {
        "step_time": {
            "form": "ring",
            "parameters": {"a": 0.00012349, "b": 2},
            "pinned": ["b"],
            "deep": {"x": [1, None, True]},
        }
    }
    ((name, table),) = model_tables(models)
    assert name == "step time"
    assert table.rows == [
        ("form", "ring", ""),
        ("parameters.a", "0.0001235", ""),
        ("parameters.b", "2", "pinned"),
        ("deep.x", "1, –, yes", ""),
    ]
    assert model_tables({"odd": None})[0][1].rows == [("value", "–", "")]


def test_an_empty_profile_folder_is_no_run(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        read_run(run)


def test_a_report_of_a_training_whose_measurements_are_gone_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    for path in run.profile.glob("*.jsonl"):
        path.unlink()
    run.report.mkdir()
    (run.report / "report.html").write_text("the page of before")
    assert main([str(run.root)]) == 2
    assert capsys.readouterr().err == f"{run.profile}: {MEASUREMENTS_GONE}\n"
    assert (run.report / "report.html").read_text() == "the page of before"


def test_a_measurement_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", stage="profile")
    damaged = sorted(run.profile.glob("*.jsonl"))[0]
    damaged.write_text("{" + damaged.read_text())
    with pages_alone("epoch_time"):
        assert main([str(run.root)]) == 0
    assert f"warning: {damaged}, line 1: is damaged" in capsys.readouterr().err
