"""Turns text into batches of token ids, and samples into token ids with label masks.

    sources --prepare_tokens--> TokenFile --pack--> Windows --split_windows--> Windows --Loader--> steps
    sources --prepare_samples--> SampleFile --PackedRows or SampleRows--> Loader

Whatever is wrong with data is a `DataError`, raised before training starts if it can be found by then.
"""
