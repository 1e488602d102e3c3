"""The playground: `regard serve`, one page in the browser and the API behind it.

| file | what it does |
| --- | --- |
| `server.py` | the application: which address does what |
| `requests.py` | what may be asked, checked; a refusal says the rule and the status |
| `batcher.py` | many requests, one beam search |
| `warming.py` | what is compiled before the first visitor comes |
| `attend_api.py` | scores, weights and outputs of the page's plane, by the library |
| `headers.py` | security headers and the body's limit, for every answer |
| `metrics.py` | counters, as Prometheus reads them |
| `openapi.py` | the API, described |
| `static/` | the page; it computes nothing, it asks the API |
"""
