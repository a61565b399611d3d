"""``python -m kvnixl.bench``: real KV blocks between two processes of this machine, over real NIXL,
every byte checked, beside NIXL's plain API and the machine's memcpy.

============  ====================================================================================
`cli`         the command line, its checks, exit codes and signals
`models`      the KV cache shapes of well-known models
`plan`        what is measured: how many blocks, which requests, which block lists
`content`     what each byte has to be, and the check that it is
`cache`       the memory of one side, one region per layer
`paths`       the ways to fetch a request: kvnixl, NIXL's plain API, with a lease check, memcpy
`pull`        the whole pull path: offer, reference, fetch, verified outcome
`overhead`    what kvnixl itself costs, with NIXL's calls replaced by empty ones
`workers`     the producer and the reader, each in a process of its own
`processes`   starting such processes, calling them, ending them whatever happens
`session`     the course of a run: who does what when
`results`     statistics and the JSON document
`machine`     what is known of the machine and the libraries
`tables`      the tables, as text
`wording`     numbers and findings in words
`page`        lines and tables on a terminal or in a pipe, and the progress bar
`report`      what people read
============  ====================================================================================

``python -m kvnixl.bench vllm`` compares kvnixl with vLLM's own connector in real vLLM engines:

==============  ==================================================================================
`vllm_bench`    what is measured: the course of such a run
`vllm_report`   what people read of it, and its JSON document
`vllm_engines`  starting vLLM engines and driving them
`vllm_child`    the engines' processes
`vllm_model`    tiny models with random weights
==============  ==================================================================================
"""
