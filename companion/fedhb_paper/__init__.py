"""The paper's tables and figures, run again: `fedhb paper`.

Each is a folder of `experiments/` with its settings, the printed numbers and our records. Its kind
is a module here, with

    work(settings) -> list of keys                  one for every record, such as
                                                    {"cell": ..., "variant": ..., "seed": ...}
    run(settings, key, folder, tell) -> result      of one record; `folder` is for checkpoints,
                                                    `tell(share, text)` for progress
    tables(settings, printed, records) -> tables    printed numbers beside ours
    figures(settings, printed, records) -> figures  (optional; see pictures.py)

and optionally `resolved(settings, key)`: everything the result depends on, by which a record is
known to be stale.
"""
