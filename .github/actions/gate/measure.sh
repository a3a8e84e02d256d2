#!/usr/bin/env bash
# Measure BASE and HEAD in turns. Whatever comes of it, GATE_FOLDER/upload then has verdict.json,
# report.md and pull-request.txt, and the exit code is 0: judge.sh fails the job.
set -euo pipefail

: "${JOB:?}" "${BASE:?}" "${GATE_FOLDER:?}"
upload=$GATE_FOLDER/upload
# An earlier use in the same job may have left a gate.
rm -rf "$upload" "$GATE_FOLDER/results"
mkdir -p "$upload"
printf '%s\n' "${PULL_REQUEST:-}" > "$upload/pull-request.txt"

# Commits that the base got since would look like changes of the pull request.
base=$(git merge-base "$BASE" HEAD) || base=$BASE
words=(ab "$JOB" --old "$base" --new HEAD -o "$GATE_FOLDER/results" --json)
words+=(--threshold "${THRESHOLD:-1.5%}" --max-minutes "${MAX_MINUTES:-60}")
if [ -n "${SETUP:-}" ]; then words+=(--setup "$SETUP"); fi
# Words without quotes, split at blanks and ends of lines; `read` fails at the end of the text.
read -r -d '' -a more <<< "${OPTIONS:-}" || true
code=0
raybench "${words[@]}" ${more[@]+"${more[@]}"} 2>&1 > "$upload/verdict.json" |
  tee "$GATE_FOLDER/progress.txt" >&2 || code=${PIPESTATUS[0]}

case $code in
  0 | 1 | 5)
    cp "$GATE_FOLDER"/results/ab/*/report.md "$upload/report.md"
    ;;
  *)
    # Without a verdict: a wrong option, no cluster, a bug.
    python3 - "$code" "$GATE_FOLDER/progress.txt" "$upload" << 'PYTHON'
import json, pathlib, sys
code, progress, upload = int(sys.argv[1]), *map(pathlib.Path, sys.argv[2:])
lines = progress.read_text(errors="replace").split("\n") if progress.exists() else []
said = next((line for line in reversed(lines) if line.strip()), "no message")
verdict = {"verdict": "not_measured", "exit_code": code, "answer": said, "points": []}
(upload / "verdict.json").write_text(json.dumps(verdict, indent=2) + "\n")
text = f"## Is NEW slower than OLD?\n\nNot measured: `raybench ab` ended with exit code {code}.\n\n"
text += f"    {said}\n\nThis says nothing about the change.\n"
(upload / "report.md").write_text(text)
PYTHON
    ;;
esac

python3 - "$upload/verdict.json" "$upload/report.md" >> "${GITHUB_OUTPUT:-/dev/stdout}" << 'PYTHON'
import json, sys
verdict = json.load(open(sys.argv[1]))
slower = sum(point["verdict"] == "slower" for point in verdict["points"])
print(f"verdict={verdict['verdict']}\nreport={sys.argv[2]}\nslower-points={slower}")
PYTHON
echo "exit-code=$code" >> "${GITHUB_OUTPUT:-/dev/stdout}"
cat "$upload/report.md" >> "${GITHUB_STEP_SUMMARY:-/dev/null}"
