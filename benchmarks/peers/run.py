"""Offbeat against torch DDP, torch's averager, torchft and Accelerate on slow links: time, loss and bytes.

    sudo python benchmarks/peers/run.py --data tinyshakespeare.txt          # everything, or:
    python benchmarks/peers/run.py search --data tinyshakespeare.txt        # learning rates, with one seed
    python benchmarks/peers/run.py loss --data tinyshakespeare.txt          # losses, in simulation
    sudo python benchmarks/peers/run.py timing --link 50mbit --data tinyshakespeare.txt
    sudo python benchmarks/peers/run.py real --link 50mbit --data tinyshakespeare.txt
    python benchmarks/peers/run.py report                                   # tables and figure

Makes an environment of its own beside this file, with the versions of requirements.txt. Results go to
results.jsonl; what is there is not repeated. Parts of names choose contenders: `run.py timing torchft`. The
contenders are in contenders.py, what they have in common in training.py.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LINKS = ("50mbit", "20mbit", "100mbit", "1gbit")


def enter_environment() -> None:
    """Continue in the environment beside this file, which is made if it is missing or out of date."""
    folder, pins = HERE / ".venv", (HERE / "requirements.txt").read_text()
    python, stamp = folder / "bin/python", folder / "stamp"
    if Path(sys.prefix) == folder:
        return
    if not stamp.exists() or stamp.read_text() != pins:
        print("Making benchmarks/peers/.venv (once; PyTorch is large) ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        # The build of the package gets the pins as well, hence PIP_CONSTRAINT.
        pinned = {**os.environ, "PIP_CONSTRAINT": str(HERE / "requirements.txt")}
        install = [python, "-m", "pip", "install", "-q", "-r", HERE / "requirements.txt", "-e", ROOT]
        subprocess.run(install, env=pinned, check=True)
        stamp.write_text(pins)
    os.execv(python, [str(python), str(HERE / "run.py"), *sys.argv[1:]])


def arguments() -> argparse.Namespace:
    commands = ["all", "search", "loss", "timing", "real", "report"]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", choices=commands, default="all")
    parser.add_argument("contenders", nargs="*", help="parts of names; all contenders if none is given")
    parser.add_argument("--data", help="a text file; the standard library's source if not given")
    parser.add_argument("--link", action="append", choices=LINKS, help="a rate; can be given several times")
    parser.add_argument("--size", default="medium", help="the model")
    parser.add_argument("--lr", type=float, default=3e-3, help="for contenders without a search")
    parser.add_argument("--blocks", type=int, default=2, help="how often each contender is timed")
    parser.add_argument("--block-steps", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed of the losses")
    parser.add_argument("--seeds", type=int, help="the seed to stop before; each contender's own by default")
    parser.add_argument("--results", type=Path, help="another file than results.jsonl, for trials")
    return parser.parse_intermixed_args()  # names may come after options


def main() -> None:
    args = arguments()
    enter_environment()
    import figure
    import measure
    import report
    from training import Setting

    measure.RESULTS = args.results or measure.RESULTS
    data = str(Path(args.data).resolve()) if args.data else None
    setting = Setting(size=args.size, data=data, lr=args.lr)
    names, everything = args.contenders, args.command == "all"
    if everything or args.command == "search":
        measure.search(setting, names)
    if everything or args.command == "loss":
        measure.loss(setting, names, seeds=args.seeds, first=args.first)
    if everything or args.command == "timing":
        for link in args.link or LINKS:
            measure.timing(setting, link, names, blocks=args.blocks, steps=args.block_steps)
    if everything or args.command == "real":
        for link in args.link or LINKS[:1]:
            measure.real(setting, link, names)
    if everything or args.command == "report":
        rows = report.read(measure.RESULTS)
        folder = measure.RESULTS.resolve().parent
        (folder / "log.md").write_text(report.log(rows))
        print(report.log(rows))
        drawn = figure.PICTURE if folder == HERE else folder / figure.PICTURE.name
        if shown := report.results(rows, "50mbit"):
            drawn.write_text(figure.picture(shown))
        if shown and folder == HERE:
            page = ROOT / "docs/benchmarks.md"
            page.write_text(report.fill(page.read_text(), report.summary(rows)))


if __name__ == "__main__":
    main()
