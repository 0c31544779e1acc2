"""Is this fleet fit for training? Tries all that a run relies on; exit status 0 if it is.

    python scripts/check_server.py http://HOST:PORT ... --model-path DIR
    python scripts/check_server.py URL URL --router-url URL --model-path DIR --tolerance 0.05

Weights are changed to those of DIR and put back. A fleet that is serving a run is disturbed.
"""

import argparse
import asyncio
import sys

from focus.engine.servers.check import Load, check_fleet


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("urls", nargs="+", metavar="URL", help="of every worker")
    parser.add_argument("--model-path", required=True, help="weights that will be trained")
    parser.add_argument("--router-url", help="of the router in front of the workers")
    parser.add_argument("--max-context", type=int, help="of the run; default: the model's")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="on log-probs")
    parser.add_argument("--requests", type=int, default=16, help="at once")
    options = parser.parse_args()
    try:
        findings = asyncio.run(
            check_fleet(
                options.urls,
                options.model_path,
                router_url=options.router_url,
                max_context=options.max_context,
                tolerance=options.tolerance,
                load=Load(requests=options.requests),
                on_finding=lambda f: print(f"{'ok' if f.fit else 'UNFIT':6}{f.name:12}{f.text}"),
            )
        )
    except ValueError as error:
        sys.exit(f"ValueError: {error}")
    sys.exit(not all(finding.fit for finding in findings))


if __name__ == "__main__":
    main()
