"""python -m benchmarks [CASE ...] [--rounds N] [--only WORD ...] [--points I ...]

Prints a table a case and one JSON document last; writes both, and a picture, into benchmarks/results/.
"""

import argparse
import json

from benchmarks import cases, harness


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(cases.names())}; default all")
    parser.add_argument("--rounds", type=int, default=1, help="processes for each contestant and point")
    parser.add_argument("--only", nargs="*", help="contestants whose names contain one of these words")
    parser.add_argument("--points", nargs="*", type=int, help="indices of the points to measure")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--point", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        case = cases.load(options.cases[0])
        return print(json.dumps(case.run(options.worker, case.POINTS[options.point])))
    documents = []
    for name in options.cases or cases.names():
        case = cases.load(name)
        document = harness.run_case(name, case, rounds=options.rounds, only=options.only, points=options.points)
        stem = harness.write(document, case)
        print(f"\n{document['what']}\n{harness.table(document, case)}\nwritten: {stem.name}.json and .png\n")
        documents.append(document)
    print(json.dumps(documents))


if __name__ == "__main__":
    main()
