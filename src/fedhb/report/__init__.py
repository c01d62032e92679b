"""From the folders of runs to one HTML page: `fedhb report`.

collect     run folders -> Runs, grouped into methods
printed     the paper's numbers for a run that is one of its cells
tables      the result table
story       what was run, in a sentence, with all settings
curves, people, trust, belief   what every plot shows, as plain data (plots), with a description in words
page        all of it in one file: template, style sheet, script and plotting library are in assets/
"""
