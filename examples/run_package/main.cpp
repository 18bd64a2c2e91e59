// Run a package of a model with only LibTorch.
//
//     ./run_package model.pt2 fields.pt time.pt forecast.pt
//
// The inputs are those that the metadata name, tensors written by torch.save: fields [batch, nodes, channels], float32,
// in physical units, and for data with dates the time [batch], float64. forecast.pt can be read by torch.load.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <c10/core/InferenceMode.h>

#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

std::vector<char> read_file(const std::string& name) {
  std::ifstream file(name, std::ios::binary);
  if (!file) {
    throw std::runtime_error("cannot read " + name);
  }
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void write_file(const std::string& name, const std::vector<char>& bytes) {
  std::ofstream file(name, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!file.flush()) {
    throw std::runtime_error("cannot write " + name);
  }
}

void run(const std::string& package_name, const std::vector<std::string>& input_names, const std::string& output_name) {
  c10::InferenceMode no_gradients;
  setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", 1);  // PyTorch checks the inputs in every call
  torch::inductor::AOTIModelPackageLoader package(package_name);
  auto metadata = package.get_metadata();
  for (const char* name : {"inputs", "outputs", "forecast"}) {
    std::cout << name << ": " << metadata[name] << "\n";
  }
  const bool on_gpu = metadata["AOTI_DEVICE_KEY"] == "cuda";
  std::vector<at::Tensor> inputs;
  for (const std::string& name : input_names) {
    at::Tensor input = torch::jit::pickle_load(read_file(name)).toTensor();
    inputs.push_back(input.to(on_gpu ? at::kCUDA : at::kCPU));
  }
  at::Tensor forecast = package.run(inputs).at(0).to(at::kCPU);
  write_file(output_name, torch::jit::pickle_save(forecast));
}

int main(int argc, char** argv) {
  if (argc < 4) {
    std::cerr << "usage: run_package model.pt2 fields.pt [time.pt] forecast.pt\n";
    return 2;
  }
  try {
    run(argv[1], std::vector<std::string>(argv + 2, argv + argc - 1), argv[argc - 1]);
  } catch (const std::exception& error) {
    std::cerr << "run_package: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
