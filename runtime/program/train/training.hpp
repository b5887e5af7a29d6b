// A run of `sluice train`, from its options to its summary.
#pragma once

namespace sluice {

// Arguments exclude the program's name and the command. Returns the exit code.
int train_command(int argc, char** argv);

}  // namespace sluice
