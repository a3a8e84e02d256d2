#!/usr/bin/env bash
# Fail where FAIL_ON says so. VERDICT: slower, faster, same, undecided or not_measured.
set -euo pipefail

case ${FAIL_ON:-slower}:${VERDICT:-not_measured} in
  never:*) ;;
  slower:slower | undecided:slower)
    echo "::error title=raybench::slower; the report is in the summary of this job"
    exit 1
    ;;
  undecided:undecided | undecided:not_measured)
    echo "::error title=raybench::${VERDICT/_/ }; the report is in the summary of this job"
    exit 5
    ;;
  slower:undecided | slower:not_measured)
    echo "::warning title=raybench::${VERDICT/_/ }: this is no statement about the change"
    ;;
  slower:* | undecided:*) ;;
  *)
    echo "::error title=raybench::fail-on: must be slower, undecided or never, got $FAIL_ON"
    exit 2
    ;;
esac
