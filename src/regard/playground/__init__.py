"""The playground: `regard serve`, one page in the browser and the API behind it.

| file | what it does |
| --- | --- |
| `server.py` | the application: its addresses, start and stop |
| `requests.py` | the limits, and the parsers that check a request |
| `guard.py` | security headers, limits in bytes and seconds, counters; around every request |
| `batcher.py` | requests that arrive together share one beam search |
| `translations.py` | answers from a translator, next words, programs compiled early |
| `attend_api.py` | scores, weights and outputs for the page's points |
| `openapi.py` | the API's description |
| `static/` | the page; it asks the API for every result |
"""
