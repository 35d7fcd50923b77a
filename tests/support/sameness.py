"""Show that a change keeps numbers: record the results of runs and tables, then compare.

    python -m tests.support.sameness record before.json      # on the old tree, each layout twice
    python -m tests.support.sameness compare before.json     # on the new one

Only the command line is used, so that modules may move between the two. What differs between the
two runs of a layout depends on timing; it is left out of the record, and counted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

SMALL = (
    "model.layers=4 model.hidden=32 model.heads=4 data.seq_len=32 data.kind=synthetic "
    "model.vocab_size=64 train.steps=4 train.global_batch_size=16 train.microbatch_size=2 "
    "train.eval_every=2 train.eval_batches=1 checkpoint.every=2 output.sample_tokens=0 "
    "output.tensorboard=false train.threads=1 optimizer.warmup_steps=2"
)
PIPE = "parallel.pipe=2 parallel.schedule="
SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved",
    "zero_bubble",
    "zero_bubble_v",
    "axonn",
    "2bw",
    "stash",
)
IMAGES = "data.kind=images data.source=generated model.vocab_size=0"
MASTERS = "train.precision=bf16_master memory.compute_fp32=true"
SERVED = "parallel.data=2 averaging.method=async_easgd averaging.tau=2 averaging.servers=1"
LAYOUTS = {
    "serial": "",
    "bf16": "train.precision=bf16",
    "data2": "parallel.data=2 parallel.bucket_mib=0.02",
    "data2_waits": "parallel.data=2 parallel.overlap=false",
    **{f"pipe2_{name}": PIPE + name for name in SCHEDULES},
    "pipe2_data2": PIPE + "2bw parallel.data=2",
    "data_inside_pipe": PIPE
    + 'axonn parallel.data=2 parallel.rank_order=["x","y","z","pipe","data"]',
    "feedback": PIPE + "2bw optimizer.error_feedback=true",
    "x2": "parallel.x=2",
    "y2": "parallel.y=2",
    "z2": "parallel.z=2",
    "z2_gathers": "parallel.z=2 parallel.share_pieces=false",
    "x2_z2_pipe2": PIPE + "1f1b parallel.x=2 parallel.z=2",
    "muon_z2": "parallel.z=2 optimizer.name=muon",
    "sgd_torch": "parallel.data=2 optimizer.name=sgd parallel.transport=torch",
    "masters": f"{MASTERS} parallel.data=2",
    "masters_2bw": f"{MASTERS} {PIPE}2bw",
    "fp16": "train.precision=fp16_master memory.compute_fp32=true",
    "disk": "parallel.data=2 memory.offload=disk memory.bucket_size=4096",
    "disk_masters_pipe2": f"{MASTERS} {PIPE}1f1b memory.offload=disk memory.bucket_size=4096",
    "recompute": PIPE + "1f1b memory.recompute=full",
    "activations": PIPE + "gpipe memory.recompute=sqrt memory.offload_activations=disk",
    "sync_easgd": "parallel.data=2 averaging.method=sync_easgd averaging.tau=2",
    "local_sgd": "parallel.data=2 averaging.method=local_sgd averaging.tau=2",
    "diloco_pipe2": PIPE + "1f1b parallel.data=2 averaging.method=diloco averaging.tau=2",
    "async_easgd": SERVED,
    "hogwild": "parallel.data=2 averaging.method=hogwild_easgd averaging.tau=2",
    "conv": f"model.kind=conv {IMAGES}",
    "mlp_x2": f"model.kind=mlp parallel.x=2 {IMAGES}",
}
TABLES = {
    **{f"schedule_{name}": f"schedule {name} --batches 2 --latency-s 0.1" for name in SCHEDULES},
    "schedule_json": "schedule 2bw --batches 3 --compare 1f1b,axonn --jitter 0.1 --json",
    **{
        f"{command}_{name}": f"{command} RUN:{name} --cluster {cluster}"
        for command, cluster in (("simulate", "summit"), ("memory", "perlmutter"))
        for name in LAYOUTS
    },
    "simulate_trace": "simulate RUN:pipe2_2bw --cluster laptop --slow 1:2 --trace out.jsonl --json",
    "print_config": "train --print-config",
}
# The record of time, of memory in use and of folders is left out: it changes from run to run.
TIMED = {"tokens_per_s", "step_s", "peak_bytes", "start_s", "end_s", "flow", "measured", "offset_s"}


def main() -> None:
    """Record, or compare with a record and end with 1 if anything differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.sameness")
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("record", type=Path)
    parser.add_argument("--only", default="", help="a regular expression for names")
    args = parser.parse_args()
    chosen = [name for name in (*LAYOUTS, *TABLES) if re.search(args.only, name)]
    if args.command == "record":
        record = {name: _repeated(name, look(name), look(name)) for name in chosen}
        args.record.write_text(json.dumps(record, indent=1) + "\n")
    else:
        sys.exit(_compare(json.loads(args.record.read_text()), chosen))


def look(name: str) -> dict[str, str]:
    """Return the results of a layout or a table, by the name of each number, file or text."""
    with tempfile.TemporaryDirectory(prefix="sameness-") as folder:
        return _train(name, Path(folder)) if name in LAYOUTS else _print(name, Path(folder))


def _repeated(name: str, first: dict[str, str], second: dict[str, str]) -> dict[str, str]:
    same = {key: value for key, value in first.items() if second.get(key) == value}
    timed = len(first) - len(same)
    print(f"{name}: exit {first['exit']}, {len(same)} facts, {timed} depend on timing", flush=True)
    return same


def _compare(record: dict[str, dict[str, str]], chosen: list[str]) -> int:
    differences = 0
    for name in chosen:
        now = look(name)
        wrong = [key for key, value in record[name].items() if now.get(key) != value]
        differences += len(wrong)
        print(f"{name}: {len(record[name])} facts, {len(wrong)} differ", *wrong[:4], flush=True)
        for key in wrong[:2]:
            print(f"  was {record[name][key][:1500]}\n  now {now.get(key, 'nothing')[:1500]}")
    print(f"{differences} differences in {len(chosen)} layouts and tables")
    return min(differences, 1)


def _ganglion(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ganglion", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def _options(name: str) -> list[str]:
    pairs = [pair.split("=", 1) for pair in f"{SMALL} {LAYOUTS[name]}".split()]
    return [word for key, value in pairs for word in (f"--{key}", value)]


def _processes(name: str) -> int:
    sizes = re.findall(r"parallel\.(?:data|pipe|x|y|z)=(\d)|averaging\.servers=(\d)", LAYOUTS[name])
    product = 1
    for size, _ in sizes:
        product *= int(size or 1)
    return product + sum(int(servers or 0) for _, servers in sizes)


def _train(name: str, folder: Path) -> dict[str, str]:
    count = ["--nproc", str(_processes(name))]
    done = _ganglion(folder, "train", *count, *_options(name), "--output.dir", "run")
    facts = {"exit": str(done.returncode), **({"printed": done.stderr} if done.returncode else {})}
    run = folder / "run"
    for number, line in enumerate(_lines(run / "metrics.jsonl")):
        facts |= {f"metrics {number} {key}": value for key, value in _untimed(line).items()}
    for file in sorted(run.glob("trace/*.jsonl")):
        facts |= _trace(file)
    for file in sorted(run.rglob("*.safetensors")):
        facts |= _tensors(file, file.relative_to(run).as_posix())
    for file in [run / "plan.json", *sorted(run.rglob("state.json"))]:
        facts[f"state {file.relative_to(run)}"] = file.read_text() if file.exists() else ""
    return facts


def _print(name: str, folder: Path) -> dict[str, str]:
    words = TABLES[name].split()
    for place, word in enumerate(words):
        if word.startswith("RUN:"):
            options = _options(word.removeprefix("RUN:"))
            (folder / "run.toml").write_text(
                _ganglion(folder, "train", "--print-config", *options).stdout
            )
            words[place] = "run.toml"
    done = _ganglion(folder, *words)
    facts = {"exit": str(done.returncode), "printed": done.stdout + done.stderr}
    for file in folder.glob("out*"):
        facts[f"written {file.name}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return facts


def _lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _untimed(record: dict[str, object]) -> dict[str, str]:
    return {key: repr(value) for key, value in record.items() if key not in TIMED}


def _trace(file: Path) -> dict[str, str]:
    """Return how often each event is there, and the order of the computations."""
    events = [json.dumps(_untimed(each), sort_keys=True) for each in _lines(file)]
    computed = [text for text in events if '"lane": "\'compute\'"' in text]
    facts = {f"trace {file.stem} order": hashlib.sha256("".join(computed).encode()).hexdigest()}
    return facts | {f"trace {file.stem} {key}": str(n) for key, n in Counter(events).items()}


def _tensors(file: Path, name: str) -> dict[str, str]:
    """Return a digest of each tensor of a file of safetensors, whatever its type."""
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    facts = {}
    for key, entry in header.items():
        if key != "__metadata__":
            first, last = (begin + offset for offset in entry["data_offsets"])
            text = f"{entry['dtype']} {entry['shape']} "
            facts[f"tensors {name} {key}"] = text + hashlib.sha256(data[first:last]).hexdigest()
    return facts


if __name__ == "__main__":
    main()
