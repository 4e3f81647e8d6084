"""Published filter rules as SQL predicates over `pairs`, one file a rule set.

Way in: the columns of `pairs` (ingest's, and the list's own). Way out: a boolean a pair and rule.
`dedup.filters` reads them; the form of a file is described there.
"""
