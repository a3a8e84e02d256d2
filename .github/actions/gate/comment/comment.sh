#!/usr/bin/env bash
# Write report.md of GATE_FOLDER as a comment of the pull request, or update the earlier comment.
# The code of a fork has made the files: they are data, never commands.
set -euo pipefail

: "${GATE_FOLDER:?}" "${REPOSITORY:?}" "${HEAD_SHA:?}"
marker='<!-- raybench gate -->'
number=$(head -c 20 "$GATE_FOLDER/pull-request.txt" | tr -d '[:space:]')
if ! [[ $number =~ ^[1-9][0-9]*$ ]]; then
  echo "no pull request: nothing to comment"
  exit 0
fi
# A fork could name a pull request of somebody else.
head=$(gh api "repos/$REPOSITORY/pulls/$number" --jq .head.sha)
if [ "$head" != "$HEAD_SHA" ]; then
  echo "pull request $number is at $head, and $HEAD_SHA was measured: nothing to comment"
  exit 0
fi
body=$GATE_FOLDER/body.md
# A name after @ would be notified, so a zero-width space follows each @.
head -c 60000 "$GATE_FOLDER/report.md" | sed $'s/@/@\xe2\x80\x8b/g' > "$body.report"
{
  echo "$marker"
  # GitHub refuses more than 65,536 characters.
  # A character that is cut in two is left out.
  head -c 60000 "$body.report" | iconv -c -f utf-8 -t utf-8
  printf '\n\n<sub>%s, [run](%s)</sub>\n' "${HEAD_SHA:0:8}" "${RUN_URL:-}"
} > "$body"
comment=$(gh api --paginate "repos/$REPOSITORY/issues/$number/comments" \
  --jq ".[] | select(.user.type == \"Bot\" and (.body | startswith(\"$marker\"))) | .id" | head -n 1)
if [ -n "$comment" ]; then
  gh api --method PATCH "repos/$REPOSITORY/issues/comments/$comment" -F "body=@$body" > /dev/null
  echo "updated comment $comment of pull request $number"
else
  gh api --method POST "repos/$REPOSITORY/issues/$number/comments" -F "body=@$body" > /dev/null
  echo "wrote a comment of pull request $number"
fi
