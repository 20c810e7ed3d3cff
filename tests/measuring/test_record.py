# SPDX-License-Identifier: Apache-2.0
"""Records of a machine, tables, and the measurement of everything in one command."""

import json
from pathlib import Path

import all_results
import docs_tables
import pytest
from common import machine, options, tables


def test_the_folder_of_a_record_is_created_before_the_measurement(tmp_path, capsys):
    parser = options.make_parser("measure")
    options.add_out(parser)
    out = tmp_path / "new" / "deep" / "record.json"
    assert parser.parse_args(["--out", str(out)]).out == out
    out.write_text("there is a folder now")
    for wrong in (out / "below a file.json", tmp_path):
        with pytest.raises(SystemExit):
            parser.parse_args(["--out", str(wrong)])
        assert str(wrong) in capsys.readouterr().err


def test_a_record_has_the_machines_rates_and_load():
    described = machine.describe_machine()
    assert described["vllm_kernels"].startswith("_C")
    assert described["worker_threads"] >= 1
    assert described["load_average"] >= 0
    # A core copies 1 to 1,000 GB/s and multiplies faster than it copies single numbers.
    assert 1 < described["copy_gb_per_s"] < 1000 * described["cores"]
    assert min(described["bfloat16_gflops"], described["float32_gflops"]) > 0.1  # slowest: AVX2 in bfloat16
    assert {"l1d", "l2", "l3", "transparent_huge_pages", "family_model_stepping"} <= described.keys()
    assert machine.same_machine(described, json.loads(json.dumps(described)))
    assert not machine.same_machine(described, {**described, "family_model_stepping": "1/2/3"})


def test_machines_are_named_by_microarchitecture_and_instructions():
    described = {"processor": "AMD EPYC", "cores": 2}
    assert machine.device_of(described) == "AMD EPYC, 2 cores"
    described |= {"microarchitecture": "Zen 3", "instruction_sets": "avx2"}
    assert machine.device_of(described) == "Zen 3, AVX2, 2 cores"
    described["instruction_sets"] = "avx2 avx512f avx512_bf16"
    assert all_results.name_of(machine.device_of(described)) == "zen-3-avx512_bf16-2-cores"
    assert machine.device_of({**described, "gpu": "NVIDIA H100"}) == "NVIDIA H100"


@pytest.mark.parametrize("page", docs_tables.PAGES, ids=lambda page: page.name)
def test_pages_quote_the_committed_results(page):
    text = page.read_text()
    assert docs_tables.filled(text) == text, "run python benchmarks/docs_tables.py"


def test_pages_show_a_part_of_a_table():
    table = tables.make_table("", ["batch", "tok/s"], names=["policy"])
    for row in (("snapkv", "1", "10"), ("snapkv", "8", "20"), ("streamingllm", "8", "30")):
        table.add_row(*row)
    clauses = "columns: tok/s | policy; rows: batch = 8; rows: policy = snapkv"
    part = docs_tables.select(table, docs_tables.Source.parse(f"a.json; {clauses}"))
    assert tables.markdown(part) == "| tok/s | policy |\n| --: | --- |\n| 20 | snapkv |"
    joined = docs_tables.join([("Zen 3, AVX2, 2 cores", part), ("Zen 4, AVX2, 2 cores", part)])
    assert tables.markdown(joined).splitlines()[-1] == "| Zen 4, AVX2 | 20 | snapkv |"
    for wrong in ("columns: context", "rows: batch = 2", "lines: 2"):
        with pytest.raises(ValueError):
            docs_tables.select(table, docs_tables.Source.parse(f"a.json; {wrong}"))


def part(result: str, folder: Path, lines: str) -> all_results.Part:
    script = folder / f"{result}.py"
    script.write_text(f"import pathlib, sys\nout = pathlib.Path(sys.argv[2])\n{lines}\n")
    return all_results.Part(result, str(script), 0, "")


def test_measuring_everything_resumes_after_an_interruption(tmp_path):
    parts = (
        part("one.json", tmp_path, "out.write_text('1'); out.with_suffix('.png').write_text('plot')"),
        part("two.json", tmp_path, "out.write_text('half'); sys.exit('not today')"),
        part("three.json", tmp_path, "out.write_text('3')"),
    )
    results, logs = tmp_path / "results", tmp_path / "logs"
    results.mkdir()
    logs.mkdir()
    outcomes = [outcome for _, outcome, _ in all_results.measure_all(parts, results, logs)]
    assert [outcome.split()[0] for outcome in outcomes] == ["measured", "failed", "measured"]
    assert sorted(path.name for path in results.iterdir()) == ["one.json", "one.png", "three.json"]
    assert "not today" in (logs / "two.log").read_text()
    assert (logs / "two" / "two.json").read_text() == "half"

    mended = part("two.json", tmp_path, "out.write_text('2')")
    outcomes = [o for _, o, _ in all_results.measure_all((parts[0], mended, parts[2]), results, logs)]
    assert outcomes == ["there already", "measured", "there already"]
    assert (results / "two.json").read_text() == "2"
