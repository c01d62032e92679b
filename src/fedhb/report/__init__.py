"""From the folders of runs to one HTML page: `fedhb report`.

run_data            reads the folders of runs, and groups the runs into methods
paper_numbers       the paper's numbers for a run that is one of its cells
tables              the result table, and the clients with the worst results
summary_section     what was run, in a sentence, and all settings
curves, clients_section, uncertainty_section, posterior_section
                    the plots of each section, as plain data (plots, figures) and in words
wording             numbers and lists in words
page                the whole page in one file; assets/ has its template, style sheet, script and
                    plotting library
"""
