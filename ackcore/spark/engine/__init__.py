"""The protocol that makes each record's outcome certain: plan, run, check, decide, act, mark."""
