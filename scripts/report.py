"""Builds the HTML report of a run, whether it is over or going on, or of several runs.

python scripts/report.py runs/focus
python scripts/report.py runs/focus runs/grpo --out comparison.html
"""

import argparse

from focus.report import build_comparison, build_report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", help="directories of runs; several are compared")
    parser.add_argument("--workdir", default=None, help="directory of one run, by name")
    parser.add_argument(
        "--out", default=None, help="file to write (RUN/report.html; comparison.html beside RUN)"
    )
    args = parser.parse_args()
    runs = [*args.runs, *([args.workdir] if args.workdir else [])]
    if not runs:
        parser.error("no run: give the directory of one, or of several")
    try:
        single = len(runs) == 1
        path = build_report(runs[0], args.out) if single else build_comparison(runs, args.out)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
