"""The processes that train one model together: this one alone, with workers it started, or with launched ones."""
