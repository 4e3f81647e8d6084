"""The report: what a work folder holds, in numbers, in SQL and as one page.

In:  WORK as the other stages left it, finished or not (read through core.catalog), or a bare folder of shards.
Out: `audit.run` gives the statistics, `sql.run` rows of any query, `run.run` writes WORK/report.html.
Way: catalogue views -> aggregates in DuckDB -> plain dicts -> terminal tables, or one offline HTML page.
"""
