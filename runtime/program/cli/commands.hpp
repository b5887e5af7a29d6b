// The commands of the program that start MPI. Others: `sluice schedule` (runtime/explore), `sluice
// run` (runtime/supervise), `sluice train` (runtime/train), those that look at models in files
// (runtime/saves).
#pragma once

namespace sluice {

// `sluice <command> ...`; arguments exclude the program's name and the command. Each returns the
// exit code.
int generate_command(int argc, char** argv);
int evaluate_command(int argc, char** argv);
int doctor_command(int argc, char** argv);

}  // namespace sluice
