"""Where a request enters: public service, lifecycle, journal, router, registry, text. No torch."""
