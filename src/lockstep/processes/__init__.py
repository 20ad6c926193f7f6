"""The processes that train one model: this one alone, with workers that it started, or with launched ones."""
