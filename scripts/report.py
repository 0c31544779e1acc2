"""Builds the HTML report of a run: python scripts/report.py --workdir runs/focus."""

import argparse

from focus.report import build_report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", required=True, help="directory of the run")
    parser.add_argument("--out", default=None, help="file to write (WORKDIR/report.html)")
    args = parser.parse_args()
    try:
        path = build_report(args.workdir, args.out)
    except ValueError as error:
        parser.error(str(error))
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
