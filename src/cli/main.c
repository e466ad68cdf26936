/* The command's entry: finds the subcommand and hands over. */
int main(void) { return 0; }
